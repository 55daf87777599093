"""Streams with a pace of their own: hand-computed shares, and the intervals that the compiled loops give."""

from pathlib import Path

import pandas as pd
import pytest

from algorithms.instruction_counts import fa3_forward_mix
from simulator.event_loop import EventLoop
from simulator.warp_streams import TENSOR, WarpStreams

EXP, ISSUE = 0, 1
DATA = Path(__file__).parents[1] / "hardware_profiles" / "measurements" / "h200_sxm"


def run(*submissions):
    """End tick and ticks lost of each (stream, demand, least[, first])."""
    env = EventLoop()
    streams = WarpStreams(env, (EXP, ISSUE))
    ends, jobs = {}, []
    for i, (stream, demand, least, *first) in enumerate(submissions):
        end = lambda i=i: ends.setdefault(i, env.now)  # noqa: E731 - one for each submission
        jobs.append(streams.submit(stream, streams.demand(demand, least), end, *first))
    env.run()
    return [(ends[i], {unit: round(t) for unit, t in job.lost.items()}) for i, job in enumerate(jobs)]


def test_alone_a_stream_takes_its_pace_or_its_busiest_unit():
    assert run(("a", {ISSUE: 100}, 250)) == [(250, {})]
    assert run(("a", {ISSUE: 100, EXP: 400}, 250)) == [(400, {})]


def test_streams_that_leave_each_other_room_do_not_slow_each_other():
    assert run(("a", {ISSUE: 100}, 250), ("b", {ISSUE: 100}, 250)) == [(250, {}), (250, {})]


def test_a_short_unit_is_shared_and_what_is_lost_is_not_caught_up():
    # both want all exponentials: half each, and then the other's 100 ticks of nothing but issue at its own pace
    assert run(("a", {EXP: 100}, 100), ("b", {EXP: 100}, 100)) == [(200, {EXP: 100}), (200, {EXP: 100})]
    (long, lost), (short, _) = run(("a", {EXP: 100}, 200), ("b", {EXP: 100}, 100))
    # in proportion to what each could do: two thirds and a third of the unit until b ends
    assert (short, long) == (150, 250)
    assert lost == {EXP: 50}


def test_one_streams_jobs_queue():
    assert [end for end, _ in run(("a", {ISSUE: 10}, 100), ("a", {ISSUE: 10}, 100))] == [100, 200]


def test_tensor_instructions_come_first_and_what_they_take_is_booked_on_them():
    # they take 60 % of the slots for 100 ticks; a stream that would fill half of them gets the rest meanwhile
    (tensor, none), (end, lost) = run(("t", {ISSUE: 60}, 100, True), ("a", {ISSUE: 100}, 200))
    assert (tensor, none) == (100, {})
    assert end == 220
    assert lost == {TENSOR: 20}


def test_intervals_are_those_of_the_compiled_loops():
    loops = pd.read_csv(DATA / "sass_fa3_loops.csv", comment="#")
    loops = loops[(loops.masked == 0) & (loops.cluster == 1)]
    checked = 0
    for loop in loops.itertuples():
        if (loop.head_dim, loop.dtype) == (192, "e4m3"):
            continue  # its instructions were not counted
        interval = (loop.serial_cycles_30 - 8 * loop.exponentials) / loop.instructions
        mix = fa3_forward_mix(loop.head_dim, bool(loop.causal), loop.dtype)
        assert mix.issue_interval_cycles == pytest.approx(interval, abs=0.01), loop
        checked += 1
    assert checked == 14


def test_the_wait_for_pv_stands_where_the_schedule_has_it():
    """Behind the row maximum at head dim 64, behind a fifth to a half of softmax at the others."""
    loops = pd.read_csv(DATA / "sass_fa3_loops.csv", comment="#")
    loops = loops[(loops.masked == 0) & (loops.cluster == 1)]
    before = loops.before_pv / loops.after_qk
    assert before[loops.head_dim == 64].max() < 0.35
    assert before[loops.head_dim > 64].between(0.2, 0.6).all()
