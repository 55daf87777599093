"""The inverse question: how much of one parameter a target takes, everything else as it is; or what stops it.

The parameter is tried on a ladder of factors; the answer lies between the first rung that meets the target and the one
below it, and is closed in by bisection. Both ends are simulated, so the answer is a design that meets the target and a
slightly smaller one that does not. Larger values that miss the target again are told.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.errors import InputError, unknown
from simulator.options import RunOptions
from simulator.problem import AttentionProblem
from simulator.profile import GROUP_KEYS, Profile, key_of
from simulator.quantities import parse_quantity
from simulator.result import Result
from simulator.sensitivity import Bench, actual_factor
from simulator.sweep.spec import SWEEP_EVENT_BUDGET

#: What is asked for when no parameter is named.
DEFAULT_PARAMETERS = (
    "hbm_bandwidth_bytes_per_s",
    "smem_bytes_per_sm",
    "l2_bytes",
    "tensor_flop_per_cycle_per_sm",
)
#: The ladder reaches this factor on both sides of today's value, in this many rungs a factor of two.
REACH, RUNGS_PER_DOUBLING = 64, 2
#: How closely the answer is closed in.
PRECISION = 0.005
#: Gains below this share of today's value are called none.
_NO_HELP = 0.003
METRICS = ("time", "hbm", "l2")

_TARGET = re.compile(r"\s*([\w:]+)(?:\s+(\w+))?\s*(<=|≤|=<|<|>=|≥|=>|>)\s*(\S.*?)\s*")


@dataclass(frozen=True)
class Target:
    """``metric`` of ``algorithm`` must not exceed ``limit`` (us for time, bytes for hbm and l2)."""

    algorithm: str
    metric: str
    limit: float
    text: str

    def value(self, result: Result) -> float:
        """The metric of a result, in the unit of :attr:`limit`."""
        if self.metric == "hbm":
            return result.hbm_read_bytes + result.hbm_write_bytes
        if self.metric == "l2":
            return result.l2_read_bytes + result.l2_write_bytes
        return result.time_us

    def shown(self, value: float) -> str:
        """A value of the metric for people."""
        from simulator.wording import scaled, time_text

        return time_text(value) if self.metric == "time" else scaled(value, "B")


def parse_target(text: str, problem: AttentionProblem) -> Target:
    """``fa3 <= 1ms``, ``fa3 >= 600TFLOP/s`` or ``fa2 hbm <= 4GB``; :class:`InputError` says what is wrong."""
    from simulator.comparison import parse_algorithm

    match = _TARGET.fullmatch(text)
    if match is None:
        raise InputError(
            f"--target: {text!r} is no target; write 'fa3 <= 1ms', 'fa3 >= 600TFLOP/s' or 'fa2 hbm <= 4GB'"
        )
    algorithm, metric, relation, amount = match.groups()
    parse_algorithm(algorithm)
    metric = metric or "time"
    if metric not in METRICS:
        raise unknown("--target", metric, METRICS)
    at_most = relation[0] in "<≤=" and relation != "=>"
    amount = amount.replace(" ", "")
    try:
        if at_most:
            limit = parse_quantity(amount, "s") * 1e6 if metric == "time" else parse_quantity(amount, "bytes")
        elif metric == "time":
            # a rate is a time for the work that the problem has
            limit = problem.flops() / parse_quantity(amount, "flop/s") * 1e6 if amount else 0.0
        else:
            raise InputError(f"{metric} of at least {amount} is no target; write '<='")
    except ZeroDivisionError:
        limit = 0.0
    except InputError as error:
        raise InputError(f"--target: {error}") from None
    if limit <= 0:
        raise InputError(f"--target: {amount} is not more than 0; write for example 'fa3 <= 1ms'")
    return Target(algorithm, metric, limit, " ".join(text.split()))


@dataclass(frozen=True)
class Answer:
    """What one parameter has to be. ``factor`` ``None``: it cannot reach the target, ``why`` says what stops it.

    ``value``/``today`` are in base units (for a group of rates: factors). ``at`` is the metric there and ``limiter``
    what then limits; ``missed_factor`` is the closest tried factor that misses the target (``None``: none tried does).
    ``target`` is the target that decides and ``then`` its ``at`` for people.
    """

    key: str
    today: float
    factor: float | None
    value: float | None
    at: float | None
    limiter: str
    missed_factor: float | None
    why: str = ""
    target: str = ""
    then: str = ""


def required(bench: Bench, key: str, target: Target) -> Answer:
    """The least of ``key`` (the most, of a latency) with which ``bench`` meets ``target``, holding the rest."""
    return _Search(bench, key, target).answer()


def required_for_all(goals: Sequence[tuple[Bench, Target]], key: str) -> Answer:
    """The least of ``key`` with which every bench meets its target: what the strictest target needs, or why one of them
    cannot be met. ``why`` names the target that decides, and any that a larger value makes miss."""
    searches = [_Search(bench, key, target) for bench, target in goals]
    answers = [search.answer() for search in searches]
    if len(answers) == 1:
        return answers[0]
    missing = [i for i, answer in enumerate(answers) if answer.factor is None]
    if missing:
        why = "; ".join(f"{goals[i][1].text}: {answers[i].why}" for i in missing)
        return replace(answers[missing[0]], why=why)
    sign = searches[0].sign
    efforts = [answer.factor**sign for answer in answers if answer.factor is not None]
    strictest = max(range(len(answers)), key=lambda i: efforts[i])
    chosen = answers[strictest]
    notes = [f"'{goals[strictest][1].text}' decides", chosen.why]
    for i, search in enumerate(searches):
        if i != strictest and not search.meets(efforts[strictest]):
            notes.append(f"'{goals[i][1].text}' misses there")
    return replace(chosen, why="; ".join(filter(None, notes)))


class _Search:
    def __init__(self, bench: Bench, key: str, target: Target) -> None:
        self.bench, self.key, self.target = bench, key, target
        # of a latency or an overhead, less is better
        self.sign = -1 if key.endswith(("_latency_s", "_overhead_s", "_latency_cycles")) else 1
        self.errors: dict[float, str] = {}

    def result(self, effort: float) -> Result | None:
        """The design with ``effort`` times as good a value of the parameter; ``None`` where it cannot run."""
        try:
            return self.bench.scaled(self.key, self.factor(effort))
        except InputError as error:
            self.errors[effort] = str(error)
            return None

    def _known(self, effort: float) -> Result:
        """:meth:`result` of a design that did run."""
        found = self.result(effort)
        assert found is not None
        return found

    def factor(self, effort: float) -> float:
        return actual_factor(self.bench.profile, self.key, effort**self.sign)

    def meets(self, effort: float) -> bool:
        found = self.result(effort)
        return found is not None and self.target.value(found) <= self.target.limit

    def answer(self) -> Answer:
        steps = round(math.log2(REACH) * RUNGS_PER_DOUBLING)
        rungs = [2.0 ** (i / RUNGS_PER_DOUBLING) for i in range(-steps, steps + 1)]
        first = next((index for index, rung in enumerate(rungs) if self.meets(rung)), None)
        if first is None:
            return self._unreachable(rungs)
        high, low = rungs[first], rungs[first - 1] if first else None
        while low is not None and abs(self.factor(high) / self.factor(low) - 1) > PRECISION:
            middle = math.sqrt(low * high)
            if self.factor(middle) in (self.factor(low), self.factor(high)):
                break
            low, high = (low, middle) if self.meets(middle) else (middle, high)
        there = self._known(high)
        why = self.errors.get(low, "") if low is not None else f"even x{self.factor(high):.3g} is enough"
        again = next((rung for rung in rungs[first:] if self.result(rung) is not None and not self.meets(rung)), None)
        if again is not None:
            beyond = self._known(again)
            missed = f"{self.target.shown(self.target.value(beyond))}, limited by {beyond.limiter}"
            why = "; ".join(filter(None, [why, f"x{self.factor(again):.3g} misses again ({missed})"]))
        factor = self.factor(high)
        return Answer(
            self.key,
            self._today(),
            factor,
            self._today() * factor,
            self.target.value(there),
            there.limiter,
            self.factor(low) if low is not None else None,
            why,
            self.target.text,
            self.target.shown(self.target.value(there)),
        )

    def _today(self) -> float:
        if self.key in GROUP_KEYS:
            return 1.0
        value = self.bench.profile.values[self.key].value
        return int(value) if key_of(self.key).integer else value

    def _unreachable(self, rungs: Sequence[float]) -> Answer:
        """What stops it: the best design on the ladder and what it waits for."""
        ran = [(effort, found) for effort in rungs if (found := self.result(effort)) is not None]
        if not ran:
            return Answer(self.key, self._today(), None, None, None, "", None, self.errors[rungs[-1]], self.target.text)
        least = min(self.target.value(result) for _, result in ran)
        # of what is as good, the design with most of it: with just enough, its own lack would stand among the waits
        effort, best = max(
            (pair for pair in ran if self.target.value(pair[1]) * (1.0 - _NO_HELP) <= least), key=lambda pair: pair[0]
        )
        waits = sorted(best.waits.items(), key=lambda item: -item[1])[:2]
        causes = ", ".join(f"{name} {100 * share:.0f} %" for name, share in waits)
        reached = self.target.shown(self.target.value(best))
        why = f"at best {reached}, with x{self.factor(effort):.3g}"
        today = self.result(1.0)
        if today is not None and self.target.value(best) > (1.0 - _NO_HELP) * self.target.value(today):
            why = f"no amount of it helps: at best {reached}"
        if self.target.metric == "time":
            why += f"; then it waits for {causes}"
        else:
            once = self.target.shown(best.unique_bytes)
            why += f"; inputs read once and outputs written are {once}"
            if self.target.metric == "hbm":
                why += f", of which {self.target.shown(best.dirty_bytes_at_end)} stay in L2 at the end"
        if ran[-1][0] < rungs[-1]:
            why += f"; beyond x{self.factor(ran[-1][0]):.3g} {self.errors[rungs[-1]]}"
        at = self.target.value(best)
        return Answer(self.key, self._today(), None, None, at, best.limiter, None, why, self.target.text, reached)


@dataclass(frozen=True)
class Cell:
    """One design of a contour's grid: factors of both parameters, the metric and the limiter (or the error)."""

    x: float
    y: float
    value: float | None
    limiter: str
    error: str = ""


def grid(bench: Bench, keys: tuple[str, str], target: Target, factors: Sequence[float]) -> list[Cell]:
    """The metric over all pairs of ``factors`` of two parameters (x fastest)."""
    cells = []
    for y in factors:
        for x in factors:
            texts = {key: f"x{factor!r}" for key, factor in zip(keys, (x, y), strict=True) if factor != 1.0}
            try:
                found = bench.result(texts, SWEEP_EVENT_BUDGET)
                cells.append(Cell(x, y, target.value(found), found.limiter))
            except InputError as error:
                cells.append(Cell(x, y, None, "", str(error)))
    return cells


def bench_for(
    target: Target, problem: AttentionProblem, profile: Profile, conditions: RunOptions, hypothetical: bool
) -> Bench:
    """The bench of the target's algorithm (flash_decoding: on the problem's decode step)."""
    from simulator.comparison import decode_problem

    if target.algorithm.partition(":")[0] == "flash_decoding":
        problem = decode_problem(problem)
    return Bench(target.algorithm, problem, profile, conditions, hypothetical)
