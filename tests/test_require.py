"""The inverse question: exact on known laws, verified on real kernels, honest about what cannot be reached."""

import csv
import math

import pytest
from analytic_bench import GPU, PROBLEM, AnalyticBench
from command_line import failure

from simulator import AttentionProblem, simulate
from simulator.cli import main
from simulator.errors import InputError
from simulator.options import RunOptions
from simulator.overrides import apply_overrides
from simulator.plots.contour import contour_rows, plot_contour
from simulator.require import PRECISION, Cell, Target, bench_for, grid, parse_target, required, required_for_all
from simulator.sweep.spec import SWEEP_EVENT_BUDGET

HBM = "hbm_bandwidth_bytes_per_s"
DECODE = AttentionProblem(batch=16, heads=32, kv_heads=8, seqlen_q=1, seqlen_k=8192, head_dim=128)


def time_target(limit_us: float) -> Target:
    return Target("fa2", "time", limit_us, f"fa2 <= {limit_us} us")


@pytest.mark.parametrize(
    ("text", "algorithm", "metric", "limit"),
    [
        ("fa3 <= 1ms", "fa3", "time", 1000.0),
        ("fa3 ≤ 1 ms", "fa3", "time", 1000.0),
        ("fa2<=250us", "fa2", "time", 250.0),
        ("fa1:flash_attn_1_paper < 0.5 s", "fa1:flash_attn_1_paper", "time", 5e5),
        ("fa2 hbm <= 4GB", "fa2", "hbm", 4e9),
        ("fa2 l2 <= 512 MiB", "fa2", "l2", 512 * 2**20),
        ("fa2 time <= 2us", "fa2", "time", 2.0),
    ],
)
def test_targets_are_read_as_written(text, algorithm, metric, limit):
    target = parse_target(text, PROBLEM)
    assert (target.algorithm, target.metric) == (algorithm, metric)
    assert math.isclose(target.limit, limit)


def test_a_rate_is_a_time_for_the_problems_work():
    target = parse_target("fa3 >= 500TFLOP/s", PROBLEM)
    assert math.isclose(target.limit, PROBLEM.flops() / 500e12 * 1e6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fa3", "is no target"),
        ("fa3 == 1ms", "is no target"),
        ("fa9 <= 1ms", "'fa9' is unknown"),
        ("fa3 speed <= 1ms", "'speed' is unknown"),
        ("fa3 <= 1GB", "is a number of bytes"),
        ("fa3 >= 1ms", "is a time"),
        ("fa3 hbm >= 1GB", "at least"),
        ("fa3 <= 0ms", "not more than 0"),
        ("fa3 >= 0TFLOP/s", "not more than 0"),
        ("fa3 <= -1ms", "not more than 0"),
    ],
)
def test_what_is_no_target_is_one_line(text, said):
    with pytest.raises(InputError, match=r"^(--target|algorithm): ") as caught:
        parse_target(text, PROBLEM)
    assert said in str(caught.value)


@pytest.mark.parametrize("limit", [41.0, 55.0, 100.0, 300.0, 1000.0])
def test_a_known_law_is_inverted(limit):
    """T = 60/x + 40 <= L needs x = 60 / (L - 40), above as well as below today's value."""
    answer = required(AnalyticBench(lambda x: 60 / x + 40), HBM, time_target(limit))
    exact = 60 / (limit - 40)
    assert exact <= answer.factor <= exact * (1 + PRECISION)
    assert exact / (1 + PRECISION) <= answer.missed_factor < exact
    assert answer.at <= limit
    assert math.isclose(answer.value, GPU.hbm_bandwidth_bytes_per_s * answer.factor)


def test_what_cannot_be_reached_says_how_far_it_goes_and_what_stops_it():
    answer = required(AnalyticBench(lambda x: 60 / x + 40, lambda x: "tensor"), HBM, time_target(39.0))
    assert answer.factor is None and answer.value is None
    assert math.isclose(answer.at, 60 / 64 + 40)
    assert answer.limiter == "tensor"
    assert "at best 40.9 us, with x64; then it waits for " in answer.why


def test_less_than_the_ladder_is_said_to_be_enough():
    answer = required(AnalyticBench(lambda x: 50.0), HBM, time_target(60.0))
    assert math.isclose(answer.factor, 1 / 64)
    assert answer.missed_factor is None and "is enough" in answer.why


def test_of_a_latency_the_most_is_asked_for():
    """T = 10 x + 5 <= 25 allows x = 2."""
    answer = required(AnalyticBench(lambda x: 10 * x + 5), "hbm_latency_s", time_target(25.0))
    assert 2.0 / (1 + PRECISION) <= answer.factor <= 2.0
    assert answer.missed_factor > 2.0


def test_the_least_that_runs_is_the_answer_where_a_kernel_does_not_fit():
    answer = required(AnalyticBench(lambda x: 50.0, least=0.7), "smem_bytes_per_sm", time_target(60.0))
    assert 0.7 <= answer.factor <= 0.7 * (1 + PRECISION)
    assert "a tile needs more SMEM" in answer.why


def test_a_target_that_is_missed_again_further_up_is_told():
    bench = AnalyticBench(lambda x: 100 / x if x < 3 else 200.0)
    answer = required(bench, HBM, time_target(50.0))
    assert 2.0 <= answer.factor <= 2.0 * (1 + PRECISION)
    assert "misses again (200 us, limited by hbm)" in answer.why


def test_of_several_targets_the_strictest_decides():
    """T = 60/x + 40 <= 70 needs x = 2, T = 100/x <= 25 needs x = 4: both hold from 4 on."""
    loose = AnalyticBench(lambda x: 60 / x + 40), time_target(70.0)
    strict = AnalyticBench(lambda x: 100 / x), time_target(25.0)
    for goals in ([loose, strict], [strict, loose]):
        answer = required_for_all(goals, HBM)
        assert 4.0 <= answer.factor <= 4.0 * (1 + PRECISION)
        assert answer.target == "fa2 <= 25.0 us" and "'fa2 <= 25.0 us' decides" in answer.why
    never = required_for_all([strict, (loose[0], time_target(39.0))], HBM)
    assert never.factor is None and never.why.startswith("fa2 <= 39.0 us: at best 40.9 us")
    latencies = [(AnalyticBench(lambda x: 10 * x + 5), time_target(limit)) for limit in (25.0, 15.0)]
    assert 1.0 / (1 + PRECISION) <= required_for_all(latencies, "hbm_latency_s").factor <= 1.0


def test_what_decides_may_make_another_target_miss():
    strict = AnalyticBench(lambda x: 100 / x), time_target(25.0)
    other = AnalyticBench(lambda x: 10.0 if x < 3 else 80.0), time_target(20.0)
    assert "'fa2 <= 20.0 us' misses there" in required_for_all([strict, other], HBM).why


def test_a_parameter_that_does_nothing_is_said_to():
    answer = required(AnalyticBench(lambda x: 50.0, lambda x: "tensor"), HBM, time_target(40.0))
    assert "no amount of it helps: at best 50.0 us; then it waits for " in answer.why


def test_whole_numbers_are_answered_whole():
    answer = required(AnalyticBench(lambda x: 100 / x), "num_sms", time_target(60.0))
    sms = answer.factor * GPU.num_sms
    assert sms == pytest.approx(round(sms)) and round(sms) == math.ceil(132 / 0.6)


def test_the_answer_of_a_real_kernel_holds_when_simulated():
    """Decoding at two thirds of its time: the bandwidth found reaches it, one per cent less does not."""
    options = RunOptions(clock_mhz=1600)
    today = simulate("flash_decoding", DECODE, GPU, clock_mhz=1600).time_us
    target = parse_target(f"flash_decoding <= {today * 0.67} us", DECODE)
    answer = required(bench_for(target, DECODE, GPU, options, False), HBM, target)
    assert 1.3 < answer.factor < 2.5

    def time_us(factor: float) -> float:
        changed = apply_overrides(GPU, {HBM: f"x{factor!r}"})
        return simulate("flash_decoding", DECODE, changed, clock_mhz=1600).time_us

    assert time_us(answer.factor) <= target.limit < time_us(answer.missed_factor)
    assert answer.missed_factor > answer.factor * 0.99


def test_bytes_can_be_a_target():
    """FA2's HBM bytes at long length against the L2 that holds K and V; below the compulsory bytes nothing helps."""
    problem = AttentionProblem(batch=2, heads=16, seqlen_q=8192, head_dim=128)
    bench = bench_for(parse_target("fa2 hbm <= 1GB", problem), problem, GPU, RunOptions(clock_mhz=1500), False)
    compulsory = bench.result({}).unique_bytes
    target = parse_target(f"fa2 hbm <= {1.02 * compulsory / 1e6} MB", problem)
    answer = required(bench, "l2_bytes", target)
    assert answer.factor is not None and answer.at <= target.limit
    never = required(bench, "l2_bytes", parse_target("fa2 hbm <= 1MB", problem))
    assert never.factor is None and "inputs read once and outputs written are" in never.why


def test_a_contours_grid_is_what_simulating_each_design_gives():
    problem = AttentionProblem(batch=2, heads=4, seqlen_q=512, head_dim=64)
    target = parse_target("fa3 <= 10us", problem)
    bench = bench_for(target, problem, GPU, RunOptions(clock_mhz=1500), False)
    keys = (HBM, "tensor_flop_per_cycle_per_sm")
    cells = grid(bench, keys, target, (0.5, 1.0, 2.0))
    assert [(c.x, c.y) for c in cells] == [(x, y) for y in (0.5, 1.0, 2.0) for x in (0.5, 1.0, 2.0)]
    changed = apply_overrides(GPU, {keys[0]: "x0.5", keys[1]: "x2.0"})
    assert cells[6].value == simulate("fa3", problem, changed, clock_mhz=1500, event_budget=SWEEP_EVENT_BUDGET).time_us
    rows = contour_rows(cells, keys, (GPU.hbm_bandwidth_bytes_per_s, 1.0), target)
    assert rows[6]["x_value"] == GPU.hbm_bandwidth_bytes_per_s / 2 and rows[6]["y_value"] == 2.0
    _, ax = plot_contour(rows, "h100_sxm")
    assert "HBM bandwidth" in ax.get_xlabel() and "tensor rate" in ax.get_ylabel()


@pytest.mark.parametrize(("limit", "said"), [(1e9, ": met everywhere here"), (1e-3, ": met nowhere here"), (9.0, "")])
def test_a_contour_says_where_a_target_that_it_cannot_draw_lies(limit, said):
    cells = [Cell(x, y, None if x == y == 0.5 else 10 / x / y, "hbm") for y in (0.5, 1.0, 2.0) for x in (0.5, 1.0, 2.0)]
    rows = contour_rows(cells, (HBM, "l2_bytes"), (1.0, 1.0), Target("fa2", "time", limit, ""))
    figure, _ = plot_contour(rows, "h100_sxm")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[-1].endswith("us" + said) or labels[-1].endswith("s" + said)
    assert "cannot run" in labels


def test_the_command_answers_for_several_targets(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "130")
    small = ["--heads", "4", "--seqlen", "1024", "--head-dim", "64", "--parameters", "tensor_rate"]
    assert main(["require", *small, "--target", "fa2 <= 1s", "--target", "fa3 <= 1us"]) == 0
    shown = capsys.readouterr().out
    assert "fa2 <= 1s. h100_sxm meets it" in shown and "fa3 <= 1us. h100_sxm misses it" in shown
    assert "not reachable" in shown and "tensor rate: fa3 <= 1us: " in shown


def test_the_command_answers_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "130")
    plot, table = tmp_path / "iso.png", tmp_path / "answers.csv"
    small = ["--heads", "4", "--seqlen", "1024", "--head-dim", "64", "--target", "fa2 <= 1us"]
    files = ["--csv", str(table), "-o", str(plot), "--contour", "hbm_bandwidth,exp_rate"]
    assert main(["require", *small, "--parameters", "hbm_bandwidth", *files]) == 0
    shown = capsys.readouterr().out
    assert "h100_sxm misses it" in shown and "not reachable" in shown and "at best" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    with plot.with_suffix(".csv").open() as file:
        assert len(list(csv.DictReader(file))) == 169
    with table.open() as file:
        (row,) = csv.DictReader(file)
    assert row["key"] == HBM and row["factor"] == ""


def test_what_lets_a_kernel_run_at_all_is_an_answer(capsys, monkeypatch):
    """FA3 with too little SMEM for its tile: the least SMEM that makes it run within the target."""
    monkeypatch.setenv("COLUMNS", "200")
    small = ["--heads", "4", "--seqlen", "512", "--set", "sram_per_sm=100KiB", "--parameters", "sram"]
    assert main(["require", *small, "--target", "fa3 <= 1ms"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "h100_sxm[smem_bytes_per_sm=100KiB] cannot run it" in shown
        and "SMEM size" in shown
        and "not reachable" not in shown
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "fa3"], "--target: 'fa3' is no target"),
        (["--target", "fa3 <= 1ms", "--contour", "l2"], "--contour: needs two keys"),
        (["--target", "fa3 <= 1ms", "--target", "fa3  <= 1ms"], "--target: one is given twice"),
        (["--target", "fa3 <= 1ms", "--target", "fa2 <= 1ms", "--contour", "l2,sram"], "--contour: draws one target"),
        (["--target", "fa3 <= 1ms", "-o", "a.png"], "--plot: nothing to draw"),
        (["--target", "fa3 <= 1ms", "--parameters", "sram,smem"], "'smem' is given twice"),
        (["--target", "fa3 <= 1ms", "--gpu", "a100_sxm4_80gb"], "lacks"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, said):
    assert said in failure(capsys, "require", "--heads", "1", "--seqlen", "128", *arguments)
