"""Running a sweep: rows equal to predictions, nothing lost or done twice, whatever dies."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
from command_line import failure
from sweep_specs import LONG, SMALL, spec_file, spec_of

from simulator import AttentionProblem, load_profile, simulate
from simulator.cli import main
from simulator.errors import InputError
from simulator.sweep import runner
from simulator.sweep.designs import points_of
from simulator.sweep.journal import Journal
from simulator.sweep.output import frame_of
from simulator.sweep.points import Settings, evaluate
from simulator.sweep.runner import journal_path, run_here, run_sweep
from simulator.sweep.workers import LocalWorkers

ROOT = Path(__file__).parent.parent


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "simulator.cli", *arguments]


def started(folder: Path, *arguments: str, **options) -> subprocess.Popen:
    """``iosim`` in a process group of its own, its output in ``folder``/log."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    log = (folder / "log").open("ab")
    return subprocess.Popen(
        command(*arguments), cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True, **options
    )


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_until(condition, process: subprocess.Popen | None = None, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        assert process is None or process.poll() is None, "the sweep ended early"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory) -> bytes:
    """The table of the long sweep when nothing happens to it."""
    folder = tmp_path_factory.mktemp("straight")
    run_sweep(spec_of(folder, LONG), folder / "out.csv", jobs=2)
    return (folder / "out.csv").read_bytes()


def test_rows_are_predictions_with_every_input(tmp_path):
    spec = spec_of(tmp_path)
    rows = run_here(spec)
    assert [row["point"] for row in rows] == list(range(12))
    gpu = load_profile("h100_sxm", {"hbm_bandwidth": "x2"})
    row = next(
        r for r in rows if r["algorithm"] == "fa3" and r["seqlen_q"] == 512 and r["hbm_bandwidth_bytes_per_s"] > 6e12
    )
    assert row["hbm_bandwidth_bytes_per_s"] == gpu.hbm_bandwidth_bytes_per_s
    problem = AttentionProblem(heads=4, seqlen_q=512, head_dim=64)
    assert (row["batch"], row["kv_heads"], row["seqlen_k"], row["dtype"], row["causal"]) == (1, 4, 512, "bf16", False)
    result = simulate("fa3", problem, gpu, event_budget=5000)
    assert row["time_us"] == result.time_us
    assert row["hbm_read_bytes"] == result.hbm_read_bytes
    assert row["tile"] == "x".join(map(str, result.attributes["tile"]))


def test_a_design_that_cannot_be_is_explained_and_costs_nobody_else(tmp_path):
    """A tile that does not fit, a GPU that contradicts itself, heads that do not divide: one line each."""
    text = (
        "gpu: h100_sxm\nalgorithms: [fa2, fa3]\n"
        "hardware:\n  sram_per_sm: [228KiB, 64KiB]\n  smem_bytes_per_cta_max: [60KiB, 227KiB]\n"
        "problem:\n  seqlen: 256\n  heads: [6, 8]\n  kv_heads: 4\n"
    )
    rows = run_here(spec_of(tmp_path, text))
    errors = {row["error"] for row in rows}
    assert any("tile needs" in e and "bytes of SMEM" in e for e in errors)
    assert any("is more than smem_bytes_per_sm" in e for e in errors)
    assert any("heads: 6 is not a multiple of kv_heads 4" in e for e in errors)
    assert sum(row["error"] == "" for row in rows) == 2 and all("\n" not in e for e in errors)
    for row in rows:
        assert (row["time_us"] is None) == bool(row["error"])
        assert row["smem_bytes_per_sm"] in (228 * 1024, 64 * 1024)


def test_csv_and_parquet_hold_the_same(tmp_path, capsys):
    pytest.importorskip("pyarrow", reason="Parquet is an optional extra")
    spec = spec_file(tmp_path)
    assert main(["sweep", str(spec), "-o", str(tmp_path / "a.csv"), "-j", "1"]) == 0
    said = capsys.readouterr().out
    assert "12 points, 12 simulated now" in said and "fa3: 6 points" in said
    assert main(["sweep", str(spec), "-o", str(tmp_path / "a.parquet"), "-j", "2"]) == 0
    from_csv, parquet = pandas.read_csv(tmp_path / "a.csv"), pandas.read_parquet(tmp_path / "a.parquet")
    assert list(from_csv.columns) == list(parquet.columns)
    pandas.testing.assert_series_equal(from_csv["time_us"], parquet["time_us"].astype(float), check_names=False)
    assert str(parquet["hbm_read_bytes"].dtype) == "Int64" and str(parquet["causal"].dtype) == "boolean"

    from pyarrow import parquet as reader

    assert reader.read_schema(tmp_path / "a.parquet").metadata[b"iosim_sweep"].decode() == SMALL


def test_running_again_simulates_nothing_and_writes_the_same(tmp_path, monkeypatch):
    spec, output = spec_of(tmp_path), tmp_path / "a.csv"
    first = run_sweep(spec, output, jobs=1)
    before = output.read_bytes()
    output.unlink()

    def nobody(*_):
        raise AssertionError("workers were started for nothing")

    monkeypatch.setattr(runner, "LocalWorkers", nobody)
    again = run_sweep(spec, output, jobs=1)
    assert (first.simulated, first.found, again.simulated, again.found) == (12, 0, 0, 12)
    assert output.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["group", "parent"])
def test_a_killed_sweep_goes_on_with_nothing_lost_or_done_twice(tmp_path, in_one_go, victim):
    """SIGKILL in the middle, of everything or of the parent alone; then the same command; against a run in one go."""
    spec, output = spec_file(tmp_path, LONG), tmp_path / "out.csv"
    journal = journal_path(output)
    sweep = started(tmp_path, "sweep", str(spec), "-o", str(output), "-j", "2")
    wait_until(lambda: lines_of(journal) > 40, sweep)
    if victim == "group":
        os.killpg(sweep.pid, signal.SIGKILL)
    else:
        sweep.kill()
    sweep.wait()
    # the workers of a killed parent go by themselves
    wait_until(lambda: not _group_alive(sweep.pid), seconds=30)
    assert not output.exists()
    on_record = journal.read_bytes().splitlines()
    recorded = lines_of(journal) - 1
    assert 40 <= recorded < 300
    # a kill can also cut the last line short
    with journal.open("ab") as file:
        file.write(b'{"point":299,"algori')
    again = started(tmp_path, "sweep", str(spec), "-o", str(output), "-j", "2")
    assert again.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    assert f"300 points, {300 - recorded} simulated now" in (tmp_path / "log").read_text()
    after = journal.read_bytes().splitlines()
    assert after[: recorded + 1] == on_record[: recorded + 1], "what was on record stays as it was"
    points = [json.loads(line)["point"] for line in after[1:]]
    assert sorted(points) == list(range(300)), "every point once"
    assert output.read_bytes() == in_one_go


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    # a zombie that nobody has waited for yet is no living process
    states = [_state(p) for p in Path("/proc").iterdir() if p.name.isdigit() and _group_of(p) == group]
    return any(state not in ("Z", "X", "") for state in states)


def _stat(process: Path) -> list[str]:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(process: Path) -> str:
    return (_stat(process) or [""])[0]


def _group_of(process: Path) -> int:
    fields = _stat(process)
    return int(fields[2]) if fields else -1


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_its_points_are_done(tmp_path):
    """Kill -9 of one worker process: the sweep notices, starts others and ends with every point once."""
    spec, output = spec_file(tmp_path, LONG), tmp_path / "out.csv"
    sweep = started(tmp_path, "sweep", str(spec), "-o", str(output), "-j", "2")
    wait_until(lambda: lines_of(journal_path(output)) > 30, sweep)
    workers = [
        int(p.name)
        for p in Path("/proc").iterdir()
        if p.name.isdigit() and _group_of(p) == sweep.pid and b"spawn_main" in _command_line(p)
    ]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    assert sweep.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["point"]) for row in rows] == list(range(300))
    assert all(row["error"] == "" for row in rows)


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


class _Deadly(LocalWorkers):
    """Workers one of whose points always kills its process."""

    def submit(self, points, settings):
        from concurrent.futures import Future
        from concurrent.futures.process import BrokenProcessPool

        future: Future = Future()
        if any(point.index == 5 for point in points):
            future.set_exception(BrokenProcessPool("gone"))
        else:
            future.set_result([evaluate(point, settings) for point in points])
        return future


def test_a_point_that_kills_every_worker_is_given_up_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "LocalWorkers", _Deadly)
    done = run_sweep(spec_of(tmp_path), tmp_path / "a.csv", jobs=1)
    errors = {row["point"]: row["error"] for row in done.rows if row["error"]}
    assert list(errors) == [5] and "worker died 3 times" in errors[5]
    assert frame_of(done.rows, Settings.of(spec_of(tmp_path)).columns())["point"].tolist() == list(range(12))


def test_another_sweep_is_not_mixed_in(tmp_path):
    output = tmp_path / "a.csv"
    run_sweep(spec_of(tmp_path), output, jobs=1)
    other = spec_of(tmp_path, SMALL.replace("[256, 512]", "[256, 384]"))
    with pytest.raises(InputError, match=r"holds another sweep.*--restart"):
        run_sweep(other, output, jobs=1)
    done = run_sweep(other, output, jobs=1, restart=True)
    assert (done.simulated, done.found) == (12, 0)
    assert {row["seqlen_q"] for row in done.rows} == {256, 384}


def test_a_journal_is_written_by_one_sweep_at_a_time(tmp_path):
    with (
        Journal(tmp_path / "j", "f", 3),
        pytest.raises(InputError, match="another sweep is writing it"),
    ):
        Journal(tmp_path / "j", "f", 3)


def test_a_journal_drops_what_was_cut_short_and_counts_nothing_twice(tmp_path):
    path = tmp_path / "j"
    with Journal(path, "f", 3) as journal:
        assert journal.append([{"point": 0}, {"point": 1}]) == 2
        assert journal.append([{"point": 1}, {"point": 2}]) == 1
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with Journal(path, "f", 3) as journal:
            kept = whole[:cut].count(b"\n") - 1
            assert sorted(journal.rows) == list(range(max(0, kept)))
            journal.append({"point": i} for i in range(3))
        lines = path.read_bytes().splitlines()
        assert [json.loads(line).get("point") for line in lines] == [None, 0, 1, 2]


def test_rows_of_other_code_are_told(tmp_path, monkeypatch):
    from simulator.sweep import journal

    run_sweep(spec_of(tmp_path), tmp_path / "a.csv", jobs=1)
    monkeypatch.setattr(journal, "code_fingerprint", lambda: "other")
    assert run_sweep(spec_of(tmp_path), tmp_path / "a.csv", jobs=1).stale


def test_tiles_auto_is_never_slower_than_the_shipped_tiles(tmp_path):
    shipped = run_here(spec_of(tmp_path, SMALL))
    searched = run_here(spec_of(tmp_path, SMALL + "tiles: auto\n"))
    for a, b in zip(shipped, searched, strict=True):
        assert b["time_us"] <= a["time_us"] * 1.0001
        assert b["tiles"] == "auto" and "tiles: auto" in b["warnings"]


def test_the_order_of_simulation_is_not_that_of_the_table(tmp_path):
    """Points that share an SM's timing run together; the table is in the order of the design."""
    points = sorted(points_of(spec_of(tmp_path)), key=runner._likeness)
    assert [p.algorithm for p in points] == ["fa2"] * 6 + ["fa3"] * 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "x.txt"], "neither .csv nor .parquet"),
        (["-o", "nowhere/x.csv"], "the folder nowhere does not exist"),
        (["-j", "2", "--scheduler", "tcp://127.0.0.1:1"], "--jobs: the cluster's workers decide that"),
    ],
)
def test_a_mistake_of_the_command_is_one_line(tmp_path, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert said in failure(capsys, "sweep", str(spec_file(tmp_path)), *arguments)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["spec.yaml"]


def test_a_dry_run_only_counts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", str(spec_file(tmp_path)), "--dry-run"]) == 0
    assert capsys.readouterr().out == "12 points: 6 designs x 2 algorithms, into spec.csv\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["spec.yaml"]
