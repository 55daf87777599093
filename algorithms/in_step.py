"""How long neighbouring CTAs of each real kernel keep in step, as ``Kernel.in_step_iterations``.

Fitted to the SM-L2 reads that an H200 counted (``counters_run1.csv``, calibrating families only): what L2 saw of the
reads that consecutive CTAs have in common. ``tests/test_read_sharing.py`` fits them again from the data.
"""

from __future__ import annotations

#: (implementation, pass) -> loop iterations at which half the common reads are still in step.
IN_STEP_ITERATIONS: dict[tuple[str, str], float] = {
    ("torch_flash", "fwd"): 4.1,
    ("torch_flash", "bwd"): 960.0,
    ("flash_attn_3", "fwd"): 112.0,
    ("flash_attn_4_sm90", "bwd"): 7.3,
    ("cudnn_sm90", "bwd"): 24.0,
}
