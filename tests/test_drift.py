"""The drift gate: predictions of a fixed set change only together with their record, which a reviewer sees."""

import pandas
import pytest
from drift import update

from simulator.csv_tables import read_table


@pytest.fixture(scope="module")
def now() -> pandas.DataFrame:
    return update.predictions()


def test_predictions_are_those_on_record(now):
    """Numbers within 0.1 %, limiters and errors exactly; after a wanted change run ``python tests/drift/update.py``."""
    assert update.RECORD.exists(), "no record yet: run 'python tests/drift/update.py'"
    lines = update.differences(read_table(update.RECORD).frame(), now)
    assert not lines, "predictions drifted; if that is wanted run 'python tests/drift/update.py'\n" + "\n".join(lines)


def test_most_cases_are_predicted(now):
    """A record of errors would be stable and worthless."""
    assert (now["error"] == "").mean() > 0.8
    assert not now["error"].str.startswith("internal error").any()


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("time_us", "110.0", "time_us 100 -> 110 (+10.00 %)"),
        ("time_us", "", "time_us 100.0 -> none"),
        ("limiter", "hbm", "limiter 'tensor' -> 'hbm'"),
        ("error", "broken", "error '' -> 'broken'"),
    ],
)
def test_a_drift_is_named(column, value, said):
    """Each kind of change becomes one line that says which case moved and how."""
    record = _record()
    changed = record.copy()
    changed.loc[0, column] = value
    (line,) = update.differences(record, changed)
    assert line.startswith("a case on h100_sxm: ")
    assert said in line


def test_a_small_change_is_no_drift():
    """0.05 % is within the tolerance, 0.2 % is not."""
    record = _record()
    near, far = record.copy(), record.copy()
    near.loc[0, "time_us"], far.loc[0, "time_us"] = "100.05", "100.2"
    assert update.differences(record, near) == []
    assert len(update.differences(record, far)) == 1


def test_other_cases_than_recorded_are_told():
    """A case that was added without updating the record does not pass silently."""
    record = _record()
    changed = record.copy()
    changed.loc[0, "seqlen_q"] = "2048"
    assert "different cases" in update.differences(record, changed)[0]


def _record() -> pandas.DataFrame:
    row = {"case": "a case", "gpu": "h100_sxm", "seqlen_q": "1024"} | dict.fromkeys(update.NUMBERS, "100.0")
    return pandas.DataFrame([row | {"limiter": "tensor", "error": ""}])
