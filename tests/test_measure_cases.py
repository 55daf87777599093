"""Case lists: what is accepted, what is refused and how, and that the committed list is the one the code builds."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import InputError
from simulator.measure.case_list import all_cases, check_cases
from simulator.measure.cases import CASE_COLUMNS, Case, load_cases, parse_row, unmasked_pairs, write_cases

DATA = Path(__file__).parents[1] / "hardware_profiles" / "measurements" / "h200_sxm"


def brute_force_pairs(seqlen_q, seqlen_k, causal, window):
    left, right = window or (-1, -1)
    if causal:
        right = 0
    offset = seqlen_k - seqlen_q
    return sum(
        (left < 0 or column >= row + offset - left) and (right < 0 or column <= row + offset + right)
        for row in range(seqlen_q)
        for column in range(seqlen_k)
    )


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
    st.none() | st.tuples(st.integers(-1, 6), st.integers(-1, 6)),
)
def test_unmasked_pairs_are_those_a_double_loop_counts(seqlen_q, seqlen_k, causal, window):
    assert unmasked_pairs(seqlen_q, seqlen_k, causal, window) == brute_force_pairs(seqlen_q, seqlen_k, causal, window)


def test_every_case_survives_a_round_trip_through_csv(tmp_path):
    cases = all_cases() + check_cases()
    write_cases(tmp_path / "cases.csv", cases)
    assert load_cases(tmp_path / "cases.csv") == cases


def test_committed_list_is_the_one_the_code_builds():
    assert load_cases(DATA / "cases.csv") == all_cases()


def test_defaults_of_a_minimal_row():
    case = parse_row({"algorithm": "fa2", "seqlen_q": "300", "heads": "8"}, "x.csv, row 1", "row1")
    assert case == Case("row1", "unnamed", "fa2", "", heads=8, kv_heads=8, seqlen_q=300, seqlen_k=300)
    assert case.flops() == 4 * 8 * 128 * 300 * 300


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"algorithm": "flash"}, "algorithm"),
        ({"seqlen_q": ""}, "seqlen_q"),
        ({"seqlen_q": "many"}, "seqlen_q"),
        ({"batch": "0"}, "batch"),
        ({"heads": "6", "kv_heads": "4"}, "kv_heads"),
        ({"dtype": "int4"}, "dtype"),
        ({"causal": "perhaps"}, "causal"),
        ({"window": "wide"}, "window"),
        ({"dropout": "0.1"}, "dropout"),
        ({"mask": "bool"}, "mask"),
        ({"timing": "wall"}, "timing"),
    ],
)
def test_a_bad_row_names_file_row_and_key(change, named, tmp_path):
    path = tmp_path / "bad.csv"
    good = {"algorithm": "fa2", "seqlen_q": "128", "heads": "4"}
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, CASE_COLUMNS, restval="")
        writer.writeheader()
        writer.writerow(good)
        writer.writerow(good | change)
    with pytest.raises(InputError, match=rf"bad\.csv, row 2: {named}") as failure:
        load_cases(path)
    assert "\n" not in str(failure.value)


def test_a_repeated_id_is_refused(tmp_path):
    path = tmp_path / "twice.csv"
    path.write_text("case_id,algorithm,seqlen_q\na,fa2,128\na,fa2,256\n")
    with pytest.raises(InputError, match="'a' appears twice"):
        load_cases(path)


def test_a_file_that_is_no_case_list_is_refused(tmp_path):
    (tmp_path / "other.csv").write_text("name,value\nx,1\n")
    with pytest.raises(InputError, match="not a case list"):
        load_cases(tmp_path / "other.csv")
    with pytest.raises(InputError, match="cannot be read"):
        load_cases(tmp_path / "missing.csv")
