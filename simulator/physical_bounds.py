"""Times that no kernel can beat: the least arithmetic at the tensor cores' peak, the least bytes at full bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.problem import AttentionProblem
from simulator.profile import Profile, tensor_dtype

#: Matrix products that each pass cannot do without (S and P kept for the backward pass): two, four, six.
_PRODUCTS = {"fwd": 2, "bwd": 4, "fwd_bwd": 6}


@dataclass(frozen=True)
class Bound:
    """``amount`` (FLOP or bytes) at ``rate_per_s`` of ``resource`` (``tensor``, ``hbm`` or ``l2``)."""

    resource: str
    amount: float
    rate_per_s: float

    @property
    def time_us(self) -> float:
        """The least time."""
        return self.amount / self.rate_per_s * 1e6


def physical_bounds(problem: AttentionProblem, profile: Profile, l2_state: str = "cold") -> tuple[Bound, ...]:
    """The bounds of a call, tightest first.

    Tensor: the products over unmasked pairs on the fastest path at the maximum clock. HBM: Q, K and V (and dO) once,
    less what a warm L2 can hold. L2: the same bytes once. A mask that is read may hide more than is known here.
    """
    flops = least_flops(problem)
    read = least_bytes(problem)
    in_l2 = profile.l2_bytes if l2_state == "warm" else 0
    bounds = (
        Bound("tensor", flops, peak_flops(problem.dtype, profile)),
        Bound("hbm", max(0, read - in_l2), profile.hbm_bandwidth_bytes_per_s),
        Bound("l2", read, profile.l2_bandwidth_bytes_per_s),
    )
    return tuple(sorted(bounds, key=lambda bound: -bound.time_us))


def peak_flops(dtype: str, profile: Profile) -> float:
    """Dense FLOP/s of the fastest instruction path at the maximum clock; fp32 counts as bf16."""
    wanted = tensor_dtype(dtype)
    rates = [table[wanted] for table in profile.tensor_flop_per_cycle_per_sm.values() if wanted in table]
    if not rates:
        rates = [max(table.values()) for table in profile.tensor_flop_per_cycle_per_sm.values()]
    return max(rates) * profile.num_sms * profile.max_clock_hz


def least_flops(problem: AttentionProblem) -> int:
    """FLOPs of the products that the pass needs, over the pairs that causal mask and window leave."""
    pairs = problem.heads * problem.unmasked_pairs()
    return _PRODUCTS[problem.pass_] * pairs * (problem.head_dim + problem.head_dim_v)


def least_bytes(problem: AttentionProblem) -> int:
    """Bytes of Q, of the rows of K and V that some query sees, and of dO in a backward pass."""
    p = problem
    left, right = p.sides
    elements = 0
    for queries, keys in p.sequences():
        seen = keys if left < 0 else min(keys, queries + left + max(0, right))
        elements += p.heads * queries * p.head_dim + p.kv_heads * seen * (p.head_dim + p.head_dim_v)
        if p.pass_ != "fwd":
            elements += p.heads * queries * p.head_dim_v
    return elements * p.element_bytes
