"""A sweep on a Dask cluster: a real scheduler and two worker processes on loopback, one of them killed midway."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import failure
from sweep_specs import LONG, spec_file, spec_of

from simulator.cli import main
from simulator.sweep.runner import journal_path, run_sweep

pytest.importorskip("distributed", reason="Dask is the optional extra [cluster]")
ROOT = Path(__file__).parent.parent


class Cluster:
    """``dask scheduler`` and two ``dask worker`` processes of one thread each."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.scheduler_file = folder / "scheduler.json"
        self.processes = [
            self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-show"),
        ]
        self.workers = [
            self._start("worker", "--nthreads", "1", "--no-nanny", "--no-dashboard", "--host", "127.0.0.1")
            for _ in range(2)
        ]
        self.processes += self.workers
        end = time.monotonic() + 60
        while not self.scheduler_file.exists():
            assert time.monotonic() < end, (folder / "dask.log").read_text()
            time.sleep(0.1)

    def _start(self, what: str, *options: str) -> subprocess.Popen:
        arguments = [sys.executable, "-m", "dask", what, "--scheduler-file", str(self.scheduler_file), *options]
        log = (self.folder / "dask.log").open("ab")
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen(arguments, cwd=self.folder, env=env, stdout=log, stderr=log)

    @property
    def address(self) -> str:
        import json

        return json.loads(self.scheduler_file.read_text())["address"]

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "cluster").mkdir()
    there = Cluster(tmp_path / "cluster")
    yield there
    there.stop()


@pytest.mark.slow
def test_a_sweep_survives_a_killed_worker_and_equals_a_local_one(tmp_path, cluster):
    """The command, unchanged but for --scheduler; SIGKILL to one of two workers while points are being done."""
    spec, output = spec_file(tmp_path, LONG), tmp_path / "out.csv"
    arguments = [sys.executable, "-m", "simulator.cli", "sweep", str(spec), "-o", str(output)]
    sweep = subprocess.Popen(
        [*arguments, "--scheduler", cluster.address],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=(tmp_path / "log").open("ab"),
        stderr=subprocess.STDOUT,
    )
    journal, end = journal_path(output), time.monotonic() + 240
    while not journal.exists() or journal.read_bytes().count(b"\n") <= 30:
        assert time.monotonic() < end
        assert sweep.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    done_before = journal.read_bytes().count(b"\n") - 1
    assert done_before < 300, "the kill came too late to mean anything"
    cluster.workers[0].send_signal(signal.SIGKILL)
    assert sweep.wait(timeout=400) == 0, (tmp_path / "log").read_text()
    assert "300 points, 300 simulated now" in (tmp_path / "log").read_text()
    assert journal.read_bytes().count(b"\n") == 301, "every point once, beside the header"
    local = tmp_path / "local.csv"
    run_sweep(spec_of(tmp_path, LONG), local, jobs=2)
    assert output.read_bytes() == local.read_bytes()


def test_a_scheduler_that_is_not_there_is_one_line(tmp_path, capsys, monkeypatch):
    from simulator.sweep import workers

    monkeypatch.setattr(workers, "_SCHEDULER_TIMEOUT_S", 1)
    spec = spec_file(tmp_path, LONG)
    said = failure(capsys, "sweep", str(spec), "-o", str(tmp_path / "a.csv"), "--scheduler", "tcp://127.0.0.1:1")
    assert "tcp://127.0.0.1:1 has no workers to offer" in said
    assert not (tmp_path / "a.csv").exists()


def test_without_dask_the_extra_is_named(tmp_path, capsys, monkeypatch):
    from simulator.sweep import workers

    monkeypatch.setattr(workers, "find_spec", lambda name: None)
    spec = spec_file(tmp_path, LONG)
    assert "install 'iosim[cluster]'" in failure(
        capsys, "sweep", str(spec), "-o", str(tmp_path / "a.csv"), "--scheduler", "tcp://127.0.0.1:1"
    )
    assert main(["sweep", str(spec), "--dry-run"]) == 0
