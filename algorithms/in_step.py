"""How long neighbouring CTAs of each real kernel keep in step, as ``Kernel.in_step_iterations``.

Fitted to the SM-L2 reads that an H200 counted (``counters_run1.csv`` and ``counters_random_run1.csv``, calibrating rows
only): what L2 saw of the reads that consecutive CTAs have in common (:mod:`simulator.read_sharing`).
``tests/test_read_sharing.py`` fits them again from the data.
"""

from __future__ import annotations

#: Loop iterations over which half the common reads are in step. FA3's forward and FA2's backward, with one CTA on an SM,
#: by head dim up to which, ...
OWN_SM: dict[int, float] = {64: 40.0, 128: 1600.0, 256: 300.0}
#: ... but FA2's backward at head dims above 64 to 128 (tiles of 64 x 128), which hardly drifts; ...
FA2_BACKWARD_128 = 300_000.0
#: ... the backward of FA4 for Hopper and of cuDNN, whose calibrating rows have one head dim, 128; ...
HOPPER_BACKWARD: dict[str, float] = {"flash_attn_4_sm90": 150.0, "cudnn_sm90": 1000.0}
#: ... FA2's forward, with two CTAs on an SM in each other's way; ...
FA2_FORWARD = 24.0
#: ... and cuBLAS's products of queries and keys.
CUBLAS_SCORES = 16.0


def own_sm(head_dim: int) -> float:
    """``in_step_iterations`` of an attention kernel that has one CTA on an SM (above 256, V's head dim: as at 256)."""
    return next((value for largest, value in OWN_SM.items() if head_dim <= largest), OWN_SM[256])


def fa2_backward(head_dim: int) -> float:
    """``in_step_iterations`` of FA2's backward."""
    return FA2_BACKWARD_128 if 64 < head_dim <= 128 else own_sm(head_dim)
