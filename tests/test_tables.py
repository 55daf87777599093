"""Tables of a terminal: whatever its width, every word is there whole and no line is longer than it."""

import io

import pytest
from rich.console import Console

from simulator.cli import main
from simulator.tables import print_labelled, print_table

HEADINGS = ("algorithm", "time", "peak\nTFLOP/s", "limiter", "meaning")
ROWS = [
    ("standard", "966 us", "wgmma 989", "imbalance", "it waits for [bold]everything[/] that there is to wait for"),
    ("flash_decoding*", "20.4 us", "mma_sync 647", "hbm", "short"),
]


def printed(width, *arguments, **options):
    out = io.StringIO()
    print_table(Console(file=out, width=width), *arguments, **options)
    return out.getvalue()


@pytest.mark.parametrize("width", [44, 60, 80, 120, 200])
def test_a_narrow_terminal_gets_more_tables_and_no_cell_is_cut(width):
    text = printed(width, HEADINGS, ROWS, prose=("meaning",))
    assert max(map(len, text.splitlines())) <= width
    for row in ROWS:
        for cell in row[:4]:
            assert cell in text
    assert all(word in text for word in ("it", "waits", "for", "everything", "there", "wait"))
    # each table begins with the row's name
    assert text.count("flash_decoding*") == text.count("algorithm")
    assert "…" not in text


def test_a_wide_terminal_gets_one_table_and_numbers_stand_below_each_other():
    lines = printed(200, HEADINGS, ROWS, prose=("meaning",)).splitlines()
    first, second = (line for line in lines if "us" in line)
    assert first.index("966 us") + len("966 us") == second.index("20.4 us") + len("20.4 us")


def test_a_word_that_fits_nowhere_is_broken_not_lost():
    text = printed(20, ("name", "value"), [("a_name_longer_than_the_terminal", "")])
    assert "a_name_longer_than_the_terminal" in "".join(line.strip() for line in text.splitlines())


def test_what_follows_a_label_stays_beside_it():
    out = io.StringIO()
    print_labelled(Console(file=out, width=30), "Call", "forward, batch 2, 16 heads, [causal]")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("Call      forward") and all(line.startswith(" " * 10) for line in lines[1:])
    assert "[causal]" in out.getvalue()


@pytest.mark.parametrize("command", [("gpus",), ("gpus", "h100_sxm"), ("gpus", "diff", "h100_sxm", "b200")])
@pytest.mark.parametrize("width", [80, 200])
def test_profiles_can_be_read_in_a_terminal_of_80_columns(command, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(list(command)) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    wanted = ["h100_sxm"] if command == ("gpus",) else ["l2_bandwidth_bytes_per_s", "9.78 TB/s", "FLOP/cycle"]
    assert all(word in text for word in wanted) and "…" not in text
