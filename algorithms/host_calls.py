"""What the host does for one library call: from the call in Python to its last launch, on an idle GPU.

Measured on the H200's host with PyTorch 2.11 and Python 3.12: tiny calls with ``timing=eager`` less the same calls in
a graph (timed_more_run1.csv, family host_call; median of the shapes). A host's time varies: single shapes lie between
a half and one and a half times these. The kernels' launches are spread evenly over the call.
"""

from __future__ import annotations

#: (implementation, pass) -> µs of host time a call.
HOST_CALL_US: dict[tuple[str, str], float] = {
    ("torch_flash", "fwd"): 30.0,
    ("torch_flash", "bwd"): 44.0,
    ("torch_flash_splitkv", "fwd"): 62.0,
    ("torch_eager", "fwd"): 118.0,
    ("torch_eager", "bwd"): 158.0,
    ("cudnn_sm90", "fwd"): 73.0,
    ("cudnn_sm90", "bwd"): 145.0,
    ("flash_attn_3", "fwd"): 131.0,
    ("flash_attn_3_kvcache", "fwd"): 199.0,
    ("flash_attn_1_paper", "fwd"): 29.0,
}


def host_call_us(implementation: str, pass_: str, launches: int, host_launch_us: float) -> float:
    """Host time of one call in µs: measured where it was, else ``host_launch_us`` for each of its ``launches``."""
    passes = ("fwd", "bwd") if pass_ == "fwd_bwd" else (pass_,)
    measured = [HOST_CALL_US.get((implementation, p)) for p in passes]
    known = [us for us in measured if us is not None]
    return sum(known) if len(known) == len(passes) else launches * host_launch_us
