"""README's section about files from strangers, claim by claim (what files may hold: test_bad_files; how their texts are
shown: test_hostile_text; which files are written: test_fuzz_cli)."""

import ast
import os
import socket
from pathlib import Path

import pytest

import simulator
from simulator import load_profile
from simulator.cli import main
from simulator.errors import InputError

ROOT = Path(simulator.__file__).parent.parent
SOURCES = sorted(path for folder in ("simulator", "algorithms") for path in (ROOT / folder).rglob("*.py"))
FORBIDDEN = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "marshal", "shelve", "dill", "urllib", "requests", "http", "socket", "ftplib"}


def calls(tree: ast.AST):
    """Names of functions that are called as plain names, and as attributes of a module's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            yield f"{node.func.value.id}.{node.func.attr}", node


def test_no_source_evaluates_text_or_speaks_to_a_network():
    assert len(SOURCES) > 100
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, node in calls(tree):
            where = f"{path}:{node.lineno}"
            assert name not in FORBIDDEN, where
            assert name not in ("os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"), where
            assert not any(k.arg == "shell" for k in node.keywords), where
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not MODULES & {name.partition(".")[0] for name in names}, path


def test_reading_uses_no_network(tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpu.yaml").write_text("name: mine\nbase: http://example.com/h100.yaml\n")
    with pytest.raises(InputError):
        load_profile(tmp_path / "gpu.yaml")
    arguments = ["compare", "--gpu", "h100_sxm", "--algorithm", "fa2", "--seqlen", "64", "-j", "1"]
    assert main(arguments) == 0
    assert os.listdir(tmp_path) == ["gpu.yaml"]


def test_base_reads_other_local_yaml_and_nothing_else(tmp_path):
    """A path to a file that is no profile is refused; of what is in it, at most a word that was read as a key."""
    (tmp_path / "secret.yaml").write_text("password: hunter2\n")
    (tmp_path / "gpu.yaml").write_text("name: mine\nbase: ./secret.yaml\n")
    with pytest.raises(InputError) as caught:
        load_profile(tmp_path / "gpu.yaml")
    assert "hunter2" not in str(caught.value)
    (tmp_path / "gpu.yaml").write_text("name: mine\nbase: /etc/passwd\n")
    with pytest.raises(InputError) as caught:
        load_profile(tmp_path / "gpu.yaml")
    assert "root:" not in str(caught.value)
    (tmp_path / "gpu.yaml").write_text("name: mine\ncalibration: {from: ./secret.yaml}\nbase: h100_sxm\n")
    with pytest.raises(InputError, match=r"secret\.yaml:1: password: unknown key"):
        load_profile(tmp_path / "gpu.yaml")


@pytest.mark.parametrize("kind", ["cell", "target", "factor"])
def test_expressions_are_words(tmp_path, monkeypatch, kind):
    """Python in a cell, a target or a factor is a mistake like any other."""
    monkeypatch.chdir(tmp_path)
    code = "__import__('os').mkdir('pwned')"
    if kind == "cell":
        Path("cases.csv").write_text(f"algorithm,batch,heads,seqlen_q,head_dim\nfa2,1,2,{code},64\n")
        assert main(["predict", "cases.csv", "--gpu", "h100_sxm", "--strict", "-j", "1"]) == 1
    elif kind == "target":
        assert main(["require", "--target", f"fa2 <= {code}", "--gpu", "h100_sxm"]) == 2
    else:
        assert main(["gpus", "h100_sxm", "--set", f"l2_bytes={code}"]) == 2
    assert not Path("pwned").exists()


def test_a_table_of_1e5_rows_needs_little_memory(tmp_path):
    """Reading 100,000 rows takes less than 300 MB beyond what importing takes; the rows need not be simulated."""
    import subprocess
    import sys

    path = tmp_path / "cases.csv"
    row = "fa2,1,2,64,64,family_a,10.5\n"
    path.write_text("algorithm,batch,heads,seqlen_q,head_dim,family,measured_time_us\n" + row * 100_000)
    program = (
        "import resource, sys; from simulator.csv_tables import read_table; import pandas; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; frame = read_table(sys.argv[1]).frame(); "
        "print(len(frame), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    rows, used_kib = (int(x) for x in done.stdout.split())
    assert rows == 100_000
    assert used_kib < 300 * 1024
