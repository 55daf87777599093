"""The report in a real browser: a click changes what is shown, nothing comes from a network, nothing complains."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import browser
import pytest

from simulator import AttentionProblem, InputError, load_profile
from simulator.cli import main
from simulator.comparison import compare
from simulator.report.page import render
from simulator.report.sections import quantity_text

PROBLEM = AttentionProblem(batch=1, heads=8, seqlen_q=2048, head_dim=128, causal=True)
ALGORITHMS = ["standard", "fa2", "fa3"]
in_browser = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "a browser is here")


@pytest.fixture(scope="module")
def comparison():
    profiles = [load_profile("h100_sxm"), load_profile("a100_sxm4_80gb")]
    return compare(PROBLEM, profiles, ALGORITHMS)


@pytest.fixture(scope="module")
def validation():
    rows = [
        (f"{a}", r, t, p) for a, r, t, p in (("fa2", "decode", 10.0, 11.0), ("fa3", "prefill >5ms", 6000.0, 5700.0))
    ]
    return [
        {
            "gpu": "h100_sxm",
            "algorithm": a,
            "regime": r,
            "measured_time_us": t,
            "predicted_time_us": p,
            "error": p / t - 1,
        }
        for a, r, t, p in rows
    ]


@pytest.fixture(scope="module")
def page(comparison, validation) -> str:
    return render(
        comparison, command="iosim report -o <r>.html", validation=validation, validation_note="Two & a half."
    )


@pytest.fixture(scope="module")
def opened(page, tmp_path_factory):
    if browser.missing():
        pytest.skip(browser.missing())
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page, encoding="utf-8")
    with browser.browser() as driver:
        driver.get(path.as_uri())
        yield driver


class _Tags(HTMLParser):
    """Checks nesting and collects ids."""

    VOID = frozenset(["meta", "link", "input", "br", "hr", "img", "path", "use", "rect"])

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        assert self.open, f"</{tag}> without a start"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()


def test_page_is_well_formed_with_unique_ids(page):
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    doubled = {name for name in tags.ids if tags.ids.count(name) > 1}
    assert not doubled


def test_page_names_no_network_address(page):
    # namespaces and licence notes are names, not addresses that a browser fetches
    fetched = re.findall(r'(?:src|href|xlink:href)="([^"]*)"|url\(([^)]*)\)|@import', page)
    assert fetched
    assert all((a or b).startswith(("#", "data:")) for a, b in fetched)


def test_text_from_outside_is_escaped(page):
    assert "iosim report -o &lt;r&gt;.html" in page
    assert "Two &amp; a half." in page
    assert "-o <r>" not in page


def test_page_says_every_profile_value_with_its_source(page, comparison):
    from html import escape

    for profile, _ in comparison.by_gpu():
        for key, quantity in profile.values.items():
            row = f"<code>{key}</code></td><td>{escape(quantity_text(quantity.value, quantity.unit))}</td>"
            assert row in page
            assert escape(quantity.source) in page


def test_what_cannot_run_says_what_the_gpu_lacks(page):
    assert "cannot run: lacks tma, wgmma" in page


def test_same_input_same_page(comparison, validation, page):
    again = render(
        comparison, command="iosim report -o <r>.html", validation=validation, validation_note="Two & a half."
    )
    assert again == page


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.98e9, "Hz", "1.98 GHz"),
        (3.35e12, "B/s", "3.35 TB/s"),
        (52428800, "B", "52,428,800 B"),
        (6.4e-7, "s", "640 ns"),
        (2.4e-6, "s", "2.4 µs"),
        (16.0, "1/cycle", "16 1/cycle"),
    ],
)
def test_quantities_as_people_write_them(value, unit, text):
    assert quantity_text(value, unit) == text


def entries(driver) -> list[tuple[str, str]]:
    script = (
        "return [...document.querySelectorAll('#comparison tr.entry')].filter(r => r.offsetParent !== null)"
        ".map(r => [r.dataset.gpu, r.dataset.series])"
    )
    return [tuple(pair) for pair in driver.execute_script(script)]


def shown(driver, selector: str) -> int:
    script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.getClientRects().length > 0).length"
    return driver.execute_script(script, selector)


def click(driver, selector: str) -> None:
    driver.execute_script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
    driver.find_element("css selector", selector).click()


@in_browser
def test_no_console_errors_and_no_request(opened):
    assert opened.get_log("browser") == []
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0


@in_browser
def test_a_click_on_a_heading_sorts(opened):
    heading = "#comparison th:nth-child(3)"
    click(opened, f"{heading} button")
    assert opened.execute_script("return document.querySelector(arguments[0]).ariaSort", heading) == "ascending"
    script = (
        "return [...document.querySelectorAll('#comparison tr.entry')].map(r => r.cells[2].dataset.value)"
        ".filter(v => v !== '').map(Number)"
    )
    times = opened.execute_script(script)
    assert len(times) == 5
    assert times == sorted(times)
    click(opened, f"{heading} button")
    assert opened.execute_script(script) == sorted(times, reverse=True)
    # what cannot run stays last
    assert entries(opened)[-1] == ("a100_sxm4_80gb", "fa3")


@in_browser
def test_a_click_on_a_row_opens_its_launches(opened):
    before = shown(opened, "#comparison tr.detail")
    click(opened, "#comparison tr.entry[data-gpu=h100_sxm][data-series=standard]")
    assert shown(opened, "#comparison tr.detail") == before + 1
    assert shown(opened, "#comparison tr.detail .inner tbody tr") >= 3
    click(opened, "#comparison tr.entry[data-gpu=h100_sxm][data-series=standard]")
    assert shown(opened, "#comparison tr.detail") == before


@in_browser
def test_switches_hide_an_algorithm_everywhere(opened):
    assert ("h100_sxm", "fa2") in entries(opened)
    marks = shown(opened, "#roofline0 [data-series=fa2]")
    assert marks > 0
    click(opened, "input[data-switch=series][value=fa2]")
    assert all(algorithm != "fa2" for _, algorithm in entries(opened))
    assert shown(opened, "[data-series=fa2]") == 0
    assert shown(opened, "#roofline0 [data-series=fa3]") > 0
    click(opened, "input[data-switch=gpu][value=a100_sxm4_80gb]")
    assert {gpu for gpu, _ in entries(opened)} == {"h100_sxm"}
    assert shown(opened, "figure[data-gpu=a100_sxm4_80gb]") == 0
    click(opened, "input[data-switch=series][value=fa2]")
    click(opened, "input[data-switch=gpu][value=a100_sxm4_80gb]")
    assert shown(opened, "#roofline0 [data-series=fa2]") == marks
    assert len(entries(opened)) == 6


@in_browser
def test_search_keeps_matching_values(opened):
    every = shown(opened, "tr.value")
    box = opened.find_element("id", "search")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
    box.send_keys("hbm_bandwidth datasheet")
    assert 0 < shown(opened, "tr.value") < every
    box.clear()
    box.send_keys("x\b")
    assert shown(opened, "tr.value") == every


@in_browser
def test_svg_text_is_text(opened):
    script = "return [...document.querySelectorAll('figure svg text')].map(t => t.textContent.trim()).filter(t => t)"
    texts = opened.execute_script(script)
    assert "FLOP per byte moved at the level of the mark" in texts
    selectable = "return getComputedStyle(document.querySelector('figure svg text')).userSelect"
    assert opened.execute_script(selectable) == "text"


@in_browser
@pytest.mark.parametrize("changes", ["", "[smem_bytes_per_sm=x2,l2_bytes=x0.5,hbm_bandwidth_bytes_per_s=8TB/s]"])
def test_a_phone_scrolls_figures_not_the_page(page, tmp_path, changes):
    """Also where the name of a GPU lists its changes."""
    path = tmp_path / "report.html"
    path.write_text(page.replace("h100_sxm", f"h100_sxm{changes}"), encoding="utf-8")
    with browser.browser(500, 800) as driver:
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True},
        )
        driver.get(path.as_uri())
        width, inner = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert inner == 390
        assert width <= inner


def test_bad_output_names_are_refused(capsys):
    assert main(["report", "-o", "report.pdf"]) == 2
    assert "end its name in .html" in capsys.readouterr().err
    assert main(["report", "-o", "no/such/folder/r.html"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_unknown_timeline_is_refused(capsys):
    assert main(["report", "-o", "r.html", "--timelines", "fa9"]) == 2
    assert "--timelines: 'fa9' is unknown" in capsys.readouterr().err


def test_data_without_times_is_refused(tmp_path):
    from simulator.report.command import validate

    path = tmp_path / "cases.csv"
    path.write_text("algorithm,batch,heads,seqlen_q,head_dim,gpu\nfa2,1,8,1024,128,h100_sxm\n")
    with pytest.raises(InputError, match=r"cases.csv:1: no column 'measured_time_us'"):
        validate(["h100_sxm"], [path], 10)


def test_validation_rows_are_predicted_not_copied(tmp_path):
    from simulator import simulate
    from simulator.report.command import validate

    path = tmp_path / "measured.csv"
    path.write_text(
        "algorithm,batch,heads,seqlen_q,head_dim,gpu,causal,measured_time_us\n"
        + "".join(f"fa2,1,8,{n},128,h100_sxm,1,100\n" for n in (512, 1024, 2048, 4096))
    )
    rows, note = validate(["h100_sxm"], [path], 2)
    assert [row["measured_time_us"] for row in rows] == [100.0, 100.0]
    expected = simulate("fa2", PROBLEM.with_(seqlen_q=512, seqlen_k=512), load_profile("h100_sxm")).time_us
    assert rows[0]["predicted_time_us"] == pytest.approx(expected)
    assert "one in 2 of the 4 rows" in note
