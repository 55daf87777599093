"""The batch interface: how cells are read, what a row's mistake does, what the output looks like."""

import dataclasses

import numpy as np
import pandas
import pytest
from stub_results import stub_result

import simulator
from simulator.errors import InputError, UnsupportedError
from simulator.predict import INPUT_COLUMNS, OUTPUT_COLUMNS, REQUIRED_COLUMNS, parse_case, predict_frame
from simulator.problem import AttentionProblem

ROW = {"algorithm": "fa2", "batch": "2", "heads": "16", "seqlen_q": "1024", "head_dim": "64", "gpu": "h100_sxm"}


@pytest.fixture
def calls(monkeypatch):
    """Every call of ``simulate``, which answers with a stub."""
    seen = []

    def simulate(algorithm, problem, profile, **conditions):
        seen.append((algorithm, problem, profile, conditions))
        if algorithm == "fa3" and profile.name.startswith("a100"):
            raise UnsupportedError("flash_attn_3 needs tma, wgmma, which a100_sxm4_80gb lacks")
        if algorithm == "broken":
            raise ZeroDivisionError("in the engine")
        return stub_result(algorithm, problem, profile, time_us=10.0 * len(seen))

    monkeypatch.setattr(simulator, "simulate", simulate, raising=False)
    return seen


def test_a_row_with_only_the_needed_columns_takes_every_default():
    case = parse_case(ROW)
    assert case.problem == AttentionProblem(batch=2, heads=16, seqlen_q=1024, head_dim=64)
    assert (case.problem.seqlen_k, case.problem.kv_heads, case.problem.head_dim_v) == (1024, 16, 64)
    assert (case.problem.dtype, case.problem.pass_, case.problem.causal) == ("bf16", "fwd", False)
    assert (case.implementation, case.conditions.l2_state, case.conditions.timing) == (None, "cold", "kernel")
    assert case.conditions.clock_mhz is None


def test_blank_cells_are_defaults():
    blank = dict.fromkeys(INPUT_COLUMNS, "")
    assert parse_case(blank | ROW) == parse_case(ROW)


@pytest.mark.parametrize(
    ("column", "cell", "attribute", "value"),
    [
        ("seqlen_q", "8192.0", "seqlen_q", 8192),
        ("seqlen_k", "8e3", "seqlen_k", 8000),
        ("causal", "True", "causal", True),
        ("causal", "0.0", "causal", False),
        ("pass", "fwd_bwd", "pass_", "fwd_bwd"),
        ("dtype", "fp8", "dtype", "fp8"),
        ("kv_heads", "4", "kv_heads", 4),
        ("head_dim_v", "128", "head_dim_v", 128),
        ("window", "1024,0", "window", (1024, 0)),
        ("window", "(1024, 512)", "window", (1024, 512)),
        ("window", "1024:0", "window", (1024, 0)),
        ("window", "1024", "window", (1024, -1)),
        ("window", "-1,-1", "window", None),
        ("mask", "padding", "mask", "padding"),
        ("dropout", "0.1", "dropout", 0.1),
        ("softcap", "50", "softcap", 50.0),
        ("num_splits", "4.0", "num_splits", 4),
        ("page_size", "256", "page_size", 256),
        ("kv_capacity", "16384", "kv_capacity", 16384),
        ("deterministic", "1", "deterministic", True),
    ],
)
def test_each_column_reaches_the_problem(column, cell, attribute, value):
    assert getattr(parse_case(ROW | {column: cell}).problem, attribute) == value


def test_conditions_reach_simulate(calls):
    extra = {"l2_state": "warm", "timing": "graph", "clock_mhz": "1830", "implementation": "torch_flash"}
    predict_frame(pandas.DataFrame([ROW | extra]))
    assert calls[0][3] == {
        "implementation": "torch_flash",
        "l2_state": "warm",
        "timing": "graph",
        "clock_mhz": 1830.0,
        "hypothetical": False,
        "tiles": None,
    }


def test_lists_of_lengths_give_batch_and_longest():
    row = {**ROW, "batch": "", "seqlen_q": "", "seqlens": "256;1024;8192"}
    p = parse_case(row).problem
    assert (p.batch, p.seqlen_q, p.seqlen_k) == (3, 8192, 8192)
    assert p.seqlens_q == p.seqlens_k == (256, 1024, 8192)
    decode = parse_case({**ROW, "batch": "3", "seqlen_q": "1", "seqlens_k": "256;1024;8192"}).problem
    assert (decode.seqlens_q, decode.seqlens_k, decode.seqlen_k) == (None, (256, 1024, 8192), 8192)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seqlen_q": "12x"}, "seqlen_q: '12x'"),
        ({"seqlen_q": "1024.5"}, "seqlen_q: '1024.5'"),
        ({"seqlen_q": "inf"}, "seqlen_q: 'inf'"),
        ({"batch": "0"}, "batch: '0'"),
        ({"heads": "-1"}, "heads: '-1'"),
        ({"heads": ""}, "heads: blank"),
        ({"algorithm": ""}, "algorithm: blank"),
        ({"causal": "maybe"}, "causal: 'maybe'"),
        ({"dtype": "float"}, "dtype: 'float'"),
        ({"pass": "forward"}, "pass: 'forward'"),
        ({"window": "1,2,3"}, "window: '1,2,3'"),
        ({"window": "-5,0"}, "window: '-5,0'"),
        ({"dropout": "lots"}, "dropout: 'lots'"),
        ({"dropout": "1.5"}, "dropout: 1.5"),
        ({"kv_heads": "3"}, "kv_heads 3"),
        ({"num_splits": "many"}, "num_splits: 'many'"),
        ({"l2_state": "hot"}, "l2_state: 'hot'"),
        ({"timing": "fast"}, "timing: 'fast'"),
        ({"clock_mhz": "-3"}, "clock_mhz: -3"),
        ({"clock_mhz": "nan"}, "clock_mhz: nan"),
        ({"gpu": ""}, "gpu: blank"),
        ({"gpu": "h900"}, "h900"),
        ({"seqlens": "256;x"}, "seqlens: '256;x'"),
        ({"seqlens": "256;512;1024"}, "seqlens_q: 3 lengths for batch 2"),
        ({"seqlens": "256;2048"}, "2048 is longer than seqlen_q 1024"),
        ({"algorithm": "broken"}, "internal error, please report it: ZeroDivisionError: in the engine"),
    ],
)
def test_a_mistake_is_the_error_of_its_row_only(calls, change, said):
    frame = pandas.DataFrame([ROW, ROW | change, ROW]).fillna("")
    predicted = predict_frame(frame)
    assert predicted["error"].tolist()[::2] == ["", ""]
    assert said in predicted["error"][1]
    assert "\n" not in predicted["error"][1]
    numbers = predicted.drop(columns=["warnings", "error", "limiter", *frame.columns])
    assert numbers.loc[1].isna().all()
    assert numbers.loc[[0, 2]].notna().all().all()
    assert predicted["limiter"][1] == ""


def test_what_a_kernel_does_not_honour_is_an_error_not_a_guess():
    """Through the real simulate: a feature of the row that the algorithm lacks."""
    frame = pandas.DataFrame([ROW | {"page_size": "256"}, ROW | {"mask": "padding"}, ROW | {"num_splits": "4"}])
    predicted = predict_frame(frame)
    for error, feature in zip(predicted["error"], ("paged", "mask", "num_splits"), strict=True):
        assert feature in error
    assert predicted["time_us"].isna().all()


def test_a_missing_capability_is_named(calls):
    predicted = predict_frame(pandas.DataFrame([ROW | {"algorithm": "fa3", "gpu": "a100_sxm4_80gb"}]))
    assert "wgmma" in predicted["error"][0]


def test_output_columns_are_the_results_row():
    """What predict promises is what a result gives, in that order."""
    assert tuple(stub_result().row()) == OUTPUT_COLUMNS


def test_rows_keep_order_index_and_other_columns(calls):
    frame = pandas.DataFrame([ROW | {"measured_time_us": "12.50", "note": "x"}, ROW | {"note": "y"}], index=[7, 3])
    predicted = predict_frame(frame)
    assert list(predicted.columns) == [*frame.columns, *OUTPUT_COLUMNS]
    assert predicted.index.tolist() == [7, 3]
    assert predicted["note"].tolist() == ["x", "y"]
    assert predicted["time_us"].tolist() == [10.0, 20.0]
    assert "time_us" not in frame.columns


def test_bytes_stay_integers_beside_an_errored_row(calls):
    predicted = predict_frame(pandas.DataFrame([ROW, ROW | {"heads": "x"}]))
    assert predicted["hbm_read_bytes"][0] == 1_000_000
    assert isinstance(predicted["hbm_read_bytes"][0], int)


def test_frames_of_numbers_work_as_well_as_texts(calls):
    typed = pandas.DataFrame(
        {
            "algorithm": ["fa2"] * 2,
            "batch": [2, 2],
            "heads": [16, 16],
            "seqlen_q": [1024.0, 1024.0],
            "head_dim": [64, 64],
        }
    )
    typed["causal"] = [True, False]
    typed["num_splits"] = [np.nan, 1.0]
    typed["window"] = [None, "128,0"]
    predicted = predict_frame(typed, "h100_sxm")
    assert predicted["error"].tolist() == ["", ""]
    assert [call[1].causal for call in calls] == [True, False]
    assert [call[1].num_splits for call in calls] == [None, 1]
    assert [call[1].window for call in calls] == [None, (128, 0)]


def test_the_gpu_column_beats_the_default(calls):
    frame = pandas.DataFrame([ROW | {"gpu": "a100_sxm4_80gb"}, ROW | {"gpu": ""}])
    predict_frame(frame, "h200_sxm")
    assert [call[2].name for call in calls] == ["a100_sxm4_80gb", "h200_sxm"]


def test_overrides_change_every_gpu(calls):
    frame = pandas.DataFrame([ROW, ROW | {"gpu": "a100_sxm4_80gb"}])
    predict_frame(frame, overrides=["l2_bytes=64MiB"])
    assert [call[2].l2_bytes for call in calls] == [64 * 2**20] * 2


def test_substitutions_are_told_in_warnings(monkeypatch):
    result = dataclasses.replace(stub_result(), warnings=("careful",), substitutions=("wgmma -> mma_sync",))
    monkeypatch.setattr(simulator, "simulate", lambda *_, **__: result, raising=False)
    predicted = predict_frame(pandas.DataFrame([ROW]), hypothetical=True)
    assert predicted["warnings"][0] == "careful; hypothetical: wgmma -> mma_sync"


@pytest.mark.parametrize("name", OUTPUT_COLUMNS)
def test_an_input_with_an_outputs_name_is_refused(name):
    with pytest.raises(InputError, match=f"column '{name}'"):
        predict_frame(pandas.DataFrame([ROW | {name: "1"}]))


@pytest.mark.parametrize("name", REQUIRED_COLUMNS)
def test_a_missing_column_that_is_needed_is_named(name):
    with pytest.raises(InputError, match=f"column '{name}': missing"):
        predict_frame(pandas.DataFrame([ROW]).drop(columns=name))


def test_a_column_that_comes_twice_is_refused():
    frame = pandas.DataFrame([["fa2", "1", "2", "3", "4", "5"]], columns=[*REQUIRED_COLUMNS, "batch"])
    with pytest.raises(InputError, match="comes 2 times"):
        predict_frame(frame)


def test_no_rows_give_no_rows(calls):
    predicted = predict_frame(pandas.DataFrame(columns=list(ROW)))
    assert list(predicted.columns) == [*ROW, *OUTPUT_COLUMNS]
    assert len(predicted) == 0


def test_on_row_is_called_after_each_row(calls):
    seen = []
    predict_frame(pandas.DataFrame([ROW, ROW | {"heads": "x"}]), on_row=lambda: seen.append(len(calls)))
    assert len(seen) == 2


@pytest.mark.slow
def test_processes_give_the_same_as_one():
    """Real predictions, spread over two processes: same rows, same order, same bytes."""
    rows = [ROW | {"seqlen_q": str(n), "seqlen_k": str(n)} for n in (256, 512, 700)] + [ROW | {"heads": "x"}]
    frame = pandas.DataFrame(rows)
    one, two = predict_frame(frame), predict_frame(frame, jobs=2)
    pandas.testing.assert_frame_equal(one, two, check_exact=True)
    assert one["error"].tolist()[:3] == ["", "", ""]
