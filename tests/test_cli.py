"""The command line as a whole: its table of commands, its exit codes, one line for every mistake."""

import os
import subprocess
import sys

import pytest
from command_line import failure

from simulator import cli
from simulator.atomic_write import write_text
from simulator.cli import main


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")


def test_help_lists_every_command_that_is_there(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("compare", "why", "predict", "gpus"):
        assert name in shown


def test_help_imports_no_command_and_nothing_heavy():
    """What keeps ``iosim --help`` fast."""
    code = (
        "import sys; from simulator.cli import main; assert main(['--help']) == 0; "
        "print([m for m in sys.modules if m.endswith('_command') or m in ('numpy', 'pandas', 'numba', 'yaml')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", [name for name, module, _ in cli.COMMANDS if cli._exists(module)])
def test_every_command_in_the_table_loads_and_has_help(capsys, name):
    assert main([name, "--help"]) == 0
    assert f"Usage: iosim {name}" in capsys.readouterr().out


def test_no_arguments_show_the_help(capsys):
    assert main([]) == 2
    assert "compare" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("iosim")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["comapre"], "comapre"),
        (["compare", "--sequence", "3"], "--sequence"),
        (["compare", "--seqlen", "many"], "--seqlen"),
        (["compare", "--seqlen", "0"], "seqlen_q: 0"),
        (["compare", "--batch", "-1"], "batch: -1"),
        (["compare", "--heads", "16", "--kv-heads", "3"], "kv_heads 3"),
        (["compare", "--dtype", "float"], "dtype: 'float'"),
        (["compare", "--pass", "sideways"], "pass: 'sideways'"),
        (["compare", "--dropout", "2"], "dropout: 2"),
        (["compare", "--window", "wide"], "window: 'wide'"),
        (["compare", "--l2-state", "hot"], "l2_state: 'hot'"),
        (["compare", "--timing", "fast"], "timing: 'fast'"),
        (["compare", "--clock-mhz", "0"], "clock_mhz: 0"),
        (["compare", "--clock-mhz", "nan"], "clock_mhz: nan"),
        (["compare", "--gpu", "h900"], "h900"),
        (["compare", "--gpu", ","], "--gpu: nothing given"),
        (["compare", "--gpu", "b200,b200"], "'b200' is given twice"),
        (["compare", "--gpu", "nowhere.yaml"], "nowhere.yaml"),
        (["compare", "--algorithm", "fa9"], "fa9"),
        (["compare", "--algorithm", "fa2:flash_attn_9"], "flash_attn_9"),
        (["compare", "--set", "l2_bites=x2"], "l2_bites"),
        (["compare", "--set", "l2_bytes"], "l2_bytes"),
        (["compare", "--set", "hbm_bandwidth=8TB"], "8TB"),
        (["compare", "--csv", "/nowhere/out.csv"], "/nowhere"),
        (["compare", "--plot", "out.doc"], "out.doc"),
        (["compare", "--csv", "same.out", "--json", "same.out"], "same.out"),
        (["why", "fa2"], "AGAINST"),
        (["why", "fa2", "fa2"], "against itself"),
        (["why", "fa2", "fa9"], "fa9"),
        (["why", "fa3", "fa2", "--gpu", "a100_sxm4_80gb"], "wgmma"),
        (["predict", "nowhere.csv", "--gpu", "h100_sxm"], "nowhere.csv"),
        (["gpus", "h900"], "h900"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, said):
    assert said in failure(capsys, *arguments)


def test_a_defect_is_not_disguised_as_a_mistake(monkeypatch):
    """Only InputError is a user's mistake; anything else keeps its traceback."""
    monkeypatch.setattr("simulator.gpus_command.profile_names", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["gpus"])


def test_a_closed_pipe_is_no_traceback():
    """``iosim gpus | head``."""
    code = f"{sys.executable} -m simulator.cli gpus --json | head -n 1"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        (">/dev/full", 2, "iosim: the output cannot be written (No space left on device); send it to another place"),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
    ],
)
def test_output_that_nobody_takes_is_no_traceback(redirected, code, said):
    command = f"{sys.executable} -m simulator.cli gpus {redirected}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (code, said)


def test_a_link_to_itself_is_replaced_by_the_file(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "a.txt")
    write_text(tmp_path / "a.txt", "x")
    assert (tmp_path / "a.txt").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_file_name_that_is_no_text_is_shown(tmp_path):
    """Found at night: the file was written and then its name could not be printed."""
    command = (
        f"cd {tmp_path} && {sys.executable} -m simulator.cli io --seqlen 64 --heads 1 --algorithm fa2 -o $'\\xff.png'"
    )
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=strict)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "wrote \\udcff.png and \\udcff.csv\n"
