"""Counted instructions against the arithmetic that they must contain."""

import ast
import csv
import math
import re
from pathlib import Path

import pytest

from algorithms import instruction_counts as counts
from algorithms.kernel_tables import (
    backward_row_blocks,
    fa2_backward_tile,
    fa3_backward_tile,
    fa3_forward_tile,
    softmax_forward_kernel,
)
from simulator.errors import InputError

MEASUREMENTS = Path(__file__).parent.parent / "hardware_profiles" / "measurements" / "h200_sxm"
H100 = dict(smem_bytes_per_cta_max=227 * 1024, smem_bytes_per_sm=228 * 1024, compute_capability=(9, 0))
FLOP_OF_MMA_LANE = 2 * 16 * 8 * 16 / 32  # m16n8k16, per lane


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fa2_backward_executes_five_products(head_dim):
    assert counts.fa2_backward_counts(head_dim).mix.tensor * FLOP_OF_MMA_LANE == pytest.approx(10 * head_dim)


def test_one_exponential_an_element_in_every_fused_kernel():
    for head_dim in (64, 128, 192, 256):
        for causal in (False, True):
            assert counts.fa3_forward_mix(head_dim, causal).xu == pytest.approx(1.04, abs=0.03)


def test_fa3_rescale_is_head_dim_over_tile_n():
    for head_dim in (64, 128, 192, 256):
        rest = counts.fa3_forward_mix(head_dim).fma - head_dim / fa3_forward_tile(head_dim).tile_n
        assert 2.15 < rest < 2.45


def test_issue_covers_the_pipes():
    mixes = [counts.fa3_forward_mix(d, c) for d in (64, 128, 192, 256) for c in (False, True)]
    mixes += [counts.softmax_mix(kind) for kind in ("warp", "registers", "smem", "global")]
    mixes += [counts.softmax_mix(kind, backward=True) for kind in ("warp", "smem", "global", "shifted")]
    mixes += [counts.elementwise_mix(kind) for kind in ("broadcast_add", "strided_copy", "vectorised")]
    mixes += [counts.fa4_backward_mix(d, c) for d in (64, 96, 128, 192, 256) for c in (False, True)]
    for mix in mixes:
        assert mix.issue > mix.fma + mix.alu + mix.xu + mix.lsu + mix.tensor


def test_backward_reads_more_smem_than_forward():
    tile = fa2_backward_tile(128, smem_bytes_per_cta_max=227 * 1024)
    assert counts.fa2_backward_counts(128).smem_wavefronts * 128 > 4 * (tile.tile_m + tile.tile_n) * 128 * 2


def counted_fa4_launches():
    """(head dim, masked) -> the main kernel's launch of the committed counters and the case it was of."""
    path = MEASUREMENTS / "mix_launches_fa4_run1.csv"
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    found = {}
    for row in rows:
        if "FlashAttentionBackwardSm90" in row["kernel_name"]:
            sizes = dict(re.findall(r"-([bhqd])(\d+)", row["case_id"]))
            found[int(sizes["d"]), row["case_id"].endswith("causal")] = row, {k: int(v) for k, v in sizes.items()}
    return found


@pytest.mark.parametrize(("key", "launch"), sorted(counted_fa4_launches().items()), ids=str)
def test_fa4_backward_counts_are_those_of_its_launches(key, launch):
    (head_dim, masked), (row, sizes) = key, launch
    tile = fa3_backward_tile(head_dim, causal=masked)
    blocks = math.ceil(sizes["q"] / tile.tile_n)
    assert ast.literal_eval(row["grid"]) == (blocks, sizes["h"], sizes["b"])
    walked = [
        backward_row_blocks(
            key_block=j, tile_m=tile.tile_m, tile_n=tile.tile_n, seqlen_q=sizes["q"], seqlen_k=sizes["q"],
            sides=(-1, 0) if masked else (-1, -1),
        )
        for j in range(blocks)
    ]  # fmt: skip
    elements = sum(len(w) for w in walked) * tile.tile_m * tile.tile_n * sizes["b"] * sizes["h"]

    def lanes(*names: str) -> float:
        return 32 * sum(float(row[name]) for name in names) / elements

    mix = counts.fa4_backward_mix(head_dim, masked)
    pipe = "sm__inst_executed_pipe_"
    uniform = lanes(f"{pipe}uniform.sum")
    assert lanes(f"{pipe}xu.sum") == pytest.approx(mix.xu, rel=0.01)
    assert lanes("smsp__inst_executed.sum") - uniform == pytest.approx(mix.issue, rel=0.01)
    for name, counted in (("fma", mix.fma), ("alu", mix.alu), ("lsu", mix.lsu), ("tensor_op_gmma", mix.tensor)):
        assert lanes(f"{pipe}{name}.sum") == pytest.approx(counted, rel=0.01), name


def test_masked_scores_cost_more_in_unfused_softmax():
    mix = counts.softmax_mix(softmax_forward_kernel(2048, "bf16").kind)
    half = mix.at_masked_fraction(0.5)
    # counted: 56.97 with a causal mask
    assert half.issue + half.issue_per_thread * 32 / 2048 == pytest.approx(57.0, abs=0.3) and half.fma == mix.fma
    with pytest.raises(InputError):
        mix.at_masked_fraction(1.5)


def test_uncounted_kinds_are_errors():
    with pytest.raises(InputError):
        counts.softmax_mix("registers", backward=True)
    with pytest.raises(InputError):
        counts.elementwise_mix("gather")
