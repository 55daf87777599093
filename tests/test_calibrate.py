"""``iosim calibrate`` finds parameters that made the times, says how surely, and touches nothing else."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from simulator.cli import app
from simulator.predict import predict_frame
from simulator.profile import load_profile

ROOT = Path(__file__).parents[1]
M = ROOT / "hardware_profiles" / "measurements" / "h200_sxm"
#: What the launches are made with, far from the profile's own 1.6 and 1.3.
MADE_WITH = {"cold_code_us": 3.0, "tma_setup_us": 0.4}
CLOCK_MHZ = 1700.0
NOISE = 0.01


def copy_with(path, values):
    """The H200's profile as a file of its own with other calibrated values."""
    shutil.copy(load_profile("h200_sxm").path, path)
    document = yaml.safe_load(path.read_text())
    for name, value in values.items():
        document["calibration"]["parameters"][name]["value"] = value
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """(what was printed, the profile's calibration before and after, rows) of a fit to times that a profile made."""
    folder = tmp_path_factory.mktemp("calibrate")
    rows = pd.read_csv(M / "timed_run1.csv", comment="#")
    rows = rows[rows["family"].isin(["fa2_cta", "fa3_cta"]) & (rows["measured_time_us"] < 40)]
    truth = copy_with(folder / "truth.yaml", MADE_WITH)
    made = predict_frame(rows.assign(clock_mhz=CLOCK_MHZ), str(truth))
    assert (made["error"] == "").all() and len(made) >= 12
    noise = np.exp(NOISE * np.random.default_rng(0).standard_normal(len(rows)))
    rows = rows.assign(measured_time_us=made["time_us"].to_numpy(float) * noise, measured_sm_clock_mhz=CLOCK_MHZ)
    # rows that only judge: a fit that read them would be far off
    wrong = rows.assign(family="judges", case_id="w" + rows["case_id"], measured_time_us=3 * rows["measured_time_us"])
    pd.concat([rows, wrong]).to_csv(folder / "data.csv", index=False)
    sides = pd.DataFrame({"family": ["fa2_cta", "fa3_cta", "judges"], "side": ["calibrate", "calibrate", "judge"]})
    sides.to_csv(folder / "split.csv", index=False)
    mine = copy_with(folder / "mine.yaml", {})
    before = yaml.safe_load(mine.read_text())["calibration"]
    result = CliRunner().invoke(app, [
        "calibrate", "--gpu", str(mine), "--data", str(folder / "data.csv"), "--split", str(folder / "split.csv"),
        "--stage", "launch",
    ])  # fmt: skip
    assert result.exit_code == 0, result.output
    return result.output, before, yaml.safe_load(mine.read_text())["calibration"], len(made)


def test_it_finds_what_made_the_times(fitted):
    _, _, after, _ = fitted
    for name, value in MADE_WITH.items():
        found = after["parameters"][name]
        low, high = found["interval_90_percent"]
        assert found["value"] == pytest.approx(value, abs=0.25), name
        assert low < found["value"] < high and high - low < 1.0
        assert found["low"] <= low and high <= found["high"]


def test_other_parameters_keep_value_and_interval(fitted):
    _, before, after, _ = fitted
    kept = 0
    for name, was in before["parameters"].items():
        if name not in MADE_WITH:
            assert after["parameters"][name] == was, name
            kept += "interval_90_percent" in was
    assert kept >= 2


def test_provenance_and_bands_are_of_these_rows(fitted):
    output, before, after, rows = fitted
    provenance = after["provenance"]
    assert provenance["data"] == "data.csv" and provenance["data_sha256"] != before["provenance"]["data_sha256"]
    assert provenance["residuals"]["launch"]["mean_abs_log_error"] < 2 * NOISE
    everything = provenance["residual_bands"]["all"]
    # only calibrating rows; their clock was held, the bands are of times at the modelled one
    assert everything["n"] == rows
    assert 1.0 < everything["high"] / everything["low"] < 1.15
    assert "cold_code_us" in output and "90 % interval" in output
