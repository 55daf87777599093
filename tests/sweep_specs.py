"""Small sweeps for the tests."""

from __future__ import annotations

from pathlib import Path

from simulator.sweep.spec import Spec, read_spec

#: Twelve quick points: three bandwidths, two lengths, two algorithms.
SMALL = """\
gpu: h100_sxm
algorithms: [fa2, fa3]
hardware:
  hbm_bandwidth: [2TB/s, x1, x2]
problem:
  heads: 4
  seqlen: [256, 512]
  head_dim: 64
event_budget: 5000
"""

#: Points for the tests that kill: enough of them to be in the middle for seconds.
LONG = """\
gpu: h100_sxm
algorithms: [fa2, fa3]
design: {kind: sobol, points: 150, seed: 7}
hardware:
  exp_rate: {from: x0.5, to: x2}
  hbm_bandwidth: {from: x0.5, to: x4, scale: log}
problem:
  heads: 8
  seqlen: {from: 256, to: 2048, multiple: 32}
  head_dim: 64
event_budget: 5000
"""


def spec_file(folder: Path, text: str = SMALL) -> Path:
    """``text`` as a file in ``folder``."""
    path = folder / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def spec_of(folder: Path, text: str = SMALL) -> Spec:
    """``text`` as a read spec."""
    return read_spec(spec_file(folder, text))
