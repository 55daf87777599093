"""Machine code on disk: never that of other sources, and safe when several processes start on an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import simulator
from simulator import compiled

PACKAGE = Path(simulator.__file__).parent
#: Two calls in the cache's own compiled functions; prints a number that depends on them.
PROGRAM = """
from test_cache_laws import cache_of, touch_rows
l2 = cache_of(200_000)
for step in range(40):
    touch_rows(l2, step % 2, 64 * (step * step % 19), 100, step % 3 == 0)
print(l2.counters.tolist())
"""


def test_every_compiled_file_is_part_of_the_digest():
    using = {path.name for path in PACKAGE.glob("*.py") if re.search(r"^@compiled$", path.read_text(), re.M)}
    assert using and using <= set(compiled.SOURCES)
    assert all("njit" not in path.read_text() for path in PACKAGE.glob("*.py") if path.name != "compiled.py")


def test_an_edit_of_one_file_gives_another_folder(tmp_path, monkeypatch):
    for name in compiled.SOURCES:
        (tmp_path / name).write_bytes((PACKAGE / name).read_bytes())
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    before = compiled.sources_digest()
    assert before == compiled.sources_digest()
    with (tmp_path / "l2_blocks.py").open("a") as file:
        file.write("# edited\n")
    assert compiled.sources_digest() != before


def test_processes_that_compile_at_once_agree(tmp_path):
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(Path(__file__).parent)]),
    }
    command = [sys.executable, "-c", PROGRAM]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=240)[0] for process in both]
    outputs.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert all(process.returncode == 0 for process in both)
    assert len(set(outputs)) == 1 and "[" in outputs[0]
    assert [path.name for path in tmp_path.iterdir()] == [compiled.cache_folder().name]
