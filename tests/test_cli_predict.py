"""``iosim predict`` on files: what passes through, what is refused, where, and with which exit code."""

import csv

import pytest
from command_line import failure
from stub_results import stub_result

import simulator
from simulator.cli import main
from simulator.predict import OUTPUT_COLUMNS

HEADER = "algorithm,batch,heads,seqlen_q,head_dim"


@pytest.fixture(autouse=True)
def stub_simulate(monkeypatch):
    """Tests of files need no real prediction."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(
        simulator, "simulate", lambda a, problem, profile, **_: stub_result(a, problem, profile), raising=False
    )


@pytest.fixture
def cases(tmp_path):
    """Write text (or bytes) to a cases file."""

    def write(text):
        path = tmp_path / "cases.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def read(path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_rows_come_back_in_order_with_everything_they_had(cases, tmp_path):
    path = cases(f'{HEADER},measured_time_us,note\nfa2,2,16,1024,64,12.50,"a, b"\nfa3,2,16,2048.0,64,007,ü\n')
    out = tmp_path / "out.csv"
    assert main(["predict", str(path), "--gpu", "h100_sxm", "-o", str(out)]) == 0
    rows = read(out)
    assert list(rows[0]) == [*HEADER.split(","), "measured_time_us", "note", *OUTPUT_COLUMNS]
    assert [row["algorithm"] for row in rows] == ["fa2", "fa3"]
    assert [row["measured_time_us"] for row in rows] == ["12.50", "007"]
    assert [row["note"] for row in rows] == ["a, b", "ü"]
    assert rows[1]["seqlen_q"] == "2048.0"
    assert rows[0]["hbm_read_bytes"] == "1000000"
    assert rows[0]["error"] == ""


def test_errored_rows_have_empty_numbers_and_exit_code_0_or_strictly_1(cases, tmp_path, capsys):
    path, out = cases(f"{HEADER}\nfa2,2,16,1024,64\nfa2,2,16,many,64\n"), tmp_path / "out.csv"
    arguments = ["predict", str(path), "--gpu", "h100_sxm", "-o", str(out)]
    assert main(arguments) == 0
    assert "1 of 2 rows" in capsys.readouterr().err
    good, bad = read(out)
    assert float(good["time_us"]) == 100.0
    assert "many" in bad["error"]
    assert all(bad[name] == "" for name in OUTPUT_COLUMNS if name != "error")
    out.unlink()
    assert main([*arguments, "--strict"]) == 1
    assert len(read(out)) == 2


def test_strict_is_0_when_every_row_is_fine(cases, tmp_path):
    path = cases(f"{HEADER}\nfa2,2,16,1024,64\n")
    assert main(["predict", str(path), "--gpu", "h100_sxm", "-o", str(tmp_path / "out.csv"), "--strict"]) == 0


def test_without_output_the_table_goes_to_stdout(cases, capsys):
    assert main(["predict", str(cases(f"{HEADER}\nfa2,2,16,1024,64\n")), "--gpu", "h100_sxm"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == ",".join([*HEADER.split(","), *OUTPUT_COLUMNS])


def test_a_byte_order_mark_windows_lines_and_blank_lines_are_read(cases, capsys):
    text = f"\ufeff{HEADER}\r\n\r\nfa2,2,16,1024,64\r\n\r\n"
    assert main(["predict", str(cases(text)), "--gpu", "h100_sxm"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cases.csv: empty"),
        ("\n\n", "cases.csv: empty"),
        (f"{HEADER}\nfa2,2,16\n", "cases.csv:2: 3 fields where the header has 5"),
        (f"{HEADER}\nfa2,2,16,1024,64\nfa2,2,16,1024,64,1\n", "cases.csv:3: 6 fields"),
        (f'{HEADER}\nfa2,2,16,1024,"64\n', "cases.csv:2: not CSV"),
        (b"algorithm,batch\nfa2,\xff\xfe\n", "cases.csv:2: not UTF-8"),
        ("batch,heads,seqlen_q,head_dim\n1,2,3,4\n", "cases.csv:1: column 'algorithm': missing"),
        (f"{HEADER},time_us\nfa2,2,16,1024,64,3\n", "cases.csv:1: column 'time_us'"),
        (f"{HEADER},batch\nfa2,2,16,1024,64,3\n", "cases.csv:1: column 'batch': comes 2 times"),
    ],
)
def test_a_file_that_is_no_table_of_cases_is_refused_with_its_line(cases, capsys, text, said):
    assert said in failure(capsys, "predict", str(cases(text)), "--gpu", "h100_sxm")


def test_a_folder_is_no_file(tmp_path, capsys):
    assert "cannot be read" in failure(capsys, "predict", str(tmp_path), "--gpu", "h100_sxm")


def test_no_gpu_at_all_is_refused(cases, capsys):
    assert "no --gpu" in failure(capsys, "predict", str(cases(f"{HEADER}\nfa2,2,16,1024,64\n")))


def test_a_bad_gpu_option_is_refused_but_a_bad_cell_is_a_rows_error(cases, tmp_path, capsys):
    path = cases(f"{HEADER},gpu\nfa2,2,16,1024,64,h900\nfa2,2,16,1024,64,\n")
    assert "h901" in failure(capsys, "predict", str(path), "--gpu", "h901")
    out = tmp_path / "out.csv"
    assert main(["predict", str(path), "--gpu", "h100_sxm", "-o", str(out)]) == 0
    bad, good = read(out)
    assert "h900" in bad["error"]
    assert good["error"] == ""


def test_a_bad_override_is_refused_even_with_gpus_in_a_column(cases, capsys):
    path = cases(f"{HEADER},gpu\nfa2,2,16,1024,64,h100_sxm\n")
    assert "l2_bites" in failure(capsys, "predict", str(path), "--set", "l2_bites=x2")


def test_the_input_is_not_overwritten(cases, capsys):
    path = cases(f"{HEADER}\nfa2,2,16,1024,64\n")
    before = path.read_bytes()
    assert "another file" in failure(capsys, "predict", str(path), "--gpu", "h100_sxm", "-o", str(path))
    assert path.read_bytes() == before


def test_an_output_folder_that_is_missing_is_refused(cases, tmp_path, capsys):
    target = tmp_path / "no" / "out.csv"
    path = cases(f"{HEADER}\nfa2,2,16,1024,64\n")
    assert "does not exist" in failure(capsys, "predict", str(path), "--gpu", "h100_sxm", "-o", str(target))


def test_an_interrupted_run_leaves_the_earlier_output(cases, tmp_path, monkeypatch):
    """The output is complete or untouched, and no temporary file stays."""
    path, out = cases(f"{HEADER}\nfa2,2,16,1024,64\n"), tmp_path / "out.csv"
    out.write_text("earlier")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulator, "simulate", interrupted, raising=False)
    assert main(["predict", str(path), "--gpu", "h100_sxm", "-o", str(out)]) == 130
    assert out.read_text() == "earlier"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cases.csv", "out.csv"]


def test_a_misspelt_column_is_told_and_passes_through(cases, capsys):
    path = cases(f"{HEADER},casual\nfa2,2,16,1024,64,1\n")
    assert main(["predict", str(path), "--gpu", "h100_sxm"]) == 0
    captured = capsys.readouterr()
    assert "did you mean 'causal'?" in captured.err
    assert captured.out.splitlines()[1].startswith("fa2,2,16,1024,64,1,100.0")


def test_tiles_are_those_of_every_row(cases, capsys, monkeypatch):
    asked = []

    def simulate(algorithm, problem, profile, *, tiles=None, **_):
        asked.append(tiles)
        return stub_result(algorithm, problem, profile)

    monkeypatch.setattr(simulator, "simulate", simulate)
    file = str(cases(f"{HEADER}\nfa2,1,1,128,64\nfa3,1,1,128,64\n"))
    assert main(["predict", file, "--gpu", "h100_sxm", "--tiles", "auto"]) == 0
    assert main(["predict", file, "--gpu", "h100_sxm", "--tiles", "kernel"]) == 0
    assert asked == ["auto", "auto", None, None]
    capsys.readouterr()
    assert "'3x' is not a tile" in failure(capsys, "predict", file, "--gpu", "h100_sxm", "--tiles", "3x")
