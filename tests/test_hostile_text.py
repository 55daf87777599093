"""Names and texts of strangers' files are shown as they are: no terminal markup, no HTML, no script of theirs runs."""

import csv
from html.parser import HTMLParser
from pathlib import Path

import pytest

import simulator
from simulator.cli import main

MARKUP = "[/][bold red]a[/b][link=file:///etc]x"
HTML = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
HOSTILE = MARKUP + HTML
SMALL = ["--batch", "1", "--heads", "2", "--seqlen", "64", "--head-dim", "64"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = HOSTILE.replace("'", "''")
    (tmp_path / "gpu.yaml").write_text(
        f"name: '{text}'\ntitle: '{text}'\nbase: h100_sxm\nnum_sms: {{value: 100, kind: assumed, source: '{text}'}}\n"
    )
    ours = (Path(simulator.__file__).parent / "models" / "gpt2-small.yaml").read_text().splitlines()
    theirs = [f"{line.split(':')[0]}: '{text}'" if line.startswith(("title", "source")) else line for line in ours]
    (tmp_path / "model.yaml").write_text("\n".join(theirs))
    with open(tmp_path / "cases.csv", "w", newline="") as file:
        rows = csv.writer(file)
        needed = ["algorithm", "batch", "heads", "seqlen_q", "head_dim", "gpu"]
        rows.writerow([*needed, "family", "measured_time_us", HOSTILE])
        rows.writerow(["fa2", 1, 2, 64, 64, "h100_sxm", HOSTILE, 10, HOSTILE])
        rows.writerow([HOSTILE, 1, 2, 64, 64, HOSTILE, HOSTILE, 10, HOSTILE])
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--gpu", "gpu.yaml", "--algorithm", "fa2", "-j", "1", *SMALL],
        ["why", "fa2", "standard", "--gpu", "gpu.yaml", *SMALL],
        ["explain", "--time-us", "9", "--algorithm", "fa2", "--gpu", "gpu.yaml", *SMALL],
        ["dispatch", "--gpu", "gpu.yaml", *SMALL],
        ["gpus", "gpu.yaml"],
        ["gpus", "diff", "h100_sxm", "gpu.yaml"],
        ["sensitivity", "--gpu", "gpu.yaml", "--algorithm", "fa2", "--parameters", "l2_bytes", *SMALL],
        ["require", "--target", "fa2 <= 1ms", "--parameters", "hbm_bandwidth", "--gpu", "gpu.yaml", *SMALL],
        ["model", "model.yaml", "--gpu", "gpu.yaml", "--batch", "1", "--seqlen", "64"],
        ["predict", "cases.csv", "-j", "1"],
        ["validate", "--data", "cases.csv", "--jobs", "1", "--by", "family,algorithm"],
        ["io", "--gpu", "gpu.yaml", "--algorithm", "fa2", "-o", "io.svg", *SMALL],
    ],
    ids=lambda arguments: arguments[0],
)
def test_markup_of_a_file_is_text(files, capsys, arguments):
    assert main(arguments) == 0
    shown = "".join("".join(capsys.readouterr()).split())
    # as it stands, nothing taken for a style; lines may break anywhere
    assert "[boldred]a" in shown or arguments[0] in ("io",)
    for name in files.iterdir():
        if name.suffix == ".svg":
            assert "<script" not in name.read_text() and "onerror=alert" not in _attributes(name.read_text())


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]


def _attributes(text: str) -> list[str]:
    page = _Tags()
    page.feed(text)
    return page.attributes


def test_html_of_a_file_is_text(files):
    """The page has as many scripts as with a harmless name, and no handler of an event."""
    pages = []
    for gpu in ("gpu.yaml", "h100_sxm"):
        arguments = ["report", "-o", f"{gpu}.html", "--timelines", "fa2", "--gpu", gpu, "--algorithm", "fa2", *SMALL]
        assert main([*arguments, "--data", "cases.csv"]) == 0
        page = _Tags()
        page.feed((files / f"{gpu}.html").read_text())
        pages.append(page)
    hostile, harmless = pages
    assert hostile.names.count("script") == harmless.names.count("script")
    assert hostile.names.count("img") == harmless.names.count("img")
    assert not [name for name in hostile.attributes if name.startswith("on")]
    assert "alert(1)" in (files / "gpu.yaml.html").read_text()
