"""A bench whose results are a formula, so that searches over it have known answers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from simulator import AttentionProblem, load_profile, simulate
from simulator.errors import UnsupportedError
from simulator.options import RunOptions
from simulator.sensitivity import Bench

PROBLEM = AttentionProblem(batch=1, heads=2, seqlen_q=256, head_dim=64)
GPU = load_profile("h100_sxm")


@lru_cache(maxsize=1)
def _template():
    return simulate("fa2", PROBLEM, GPU)


class AnalyticBench(Bench):
    """``time_us`` (and ``limiter``) as functions of one parameter's factor; below ``least`` nothing runs."""

    def __init__(self, time_us, limiter=lambda factor: "hbm", least: float = 0.0):
        super().__init__("fa2", PROBLEM, GPU, RunOptions())
        self._time_us, self._limiter, self._least = time_us, limiter, least
        self.asked: list[float] = []

    def scaled(self, key, factor, event_budget=None):
        self.asked.append(factor)
        if factor < self._least:
            raise UnsupportedError("a tile needs more SMEM")
        return replace(_template(), time_us=self._time_us(factor), limiter=self._limiter(factor))
