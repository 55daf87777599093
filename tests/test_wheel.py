"""The wheel and the sdist: built without a network, unpacked elsewhere, they hold all data and run."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("hardware_profiles", "simulator", "algorithms")


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("wheel") is None and find_spec("setuptools.command.bdist_wheel") is None,
    reason="wheels need setuptools 70.1 or the package wheel; nothing is downloaded for a test",
)
def test_the_built_package_holds_its_data_and_runs_outside_the_checkout(tmp_path):
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = tracked.stdout.splitlines() if tracked.returncode == 0 else []
    if not names:  # a copy without git
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    wanted = [n for n in names if n.split("/")[0] in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE")]
    for name in wanted:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    for kind in ("wheel", "sdist"):
        build = f"import sys; from setuptools import build_meta as b; b.build_{kind}(sys.argv.pop())"
        done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]

    kinds = (".py", ".yaml", ".csv", ".md", ".json", ".cu")
    shipped = {n for n in wanted if n.split("/")[0] in PACKAGES and Path(n).suffix in kinds}
    shipped |= {n for n in wanted if n.startswith("simulator/report/") or n.endswith("py.typed")}
    place = tmp_path / "installed"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert shipped - set(wheel.namelist()) == set()
        wheel.extractall(place)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        assert shipped - {name.partition("/")[2] for name in sdist.getnames()} == set()

    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(place)}

    def python(*arguments: str) -> str:
        ran = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        return ran.stdout

    assert "h200_sxm" in python("-m", "simulator.cli", "gpus")
    program = (
        "import simulator; from simulator import *; from simulator.report.page import __file__ as page; "
        "problem = AttentionProblem(1, 2, 2, 256, 256, 64); "
        "print(simulator.__file__, simulate('fa2', problem, load_profile('h100_sxm')).time_us)"
    )
    where, time_us = python("-c", program).split()
    assert Path(where).is_relative_to(place) and float(time_us) > 0
