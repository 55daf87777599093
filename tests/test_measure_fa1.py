"""FA1's schedule: exact, and moving the bytes that its loops imply."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.measure.fa1_triton import BLOCK_COLUMNS, BLOCK_ROWS, schedule_in_numpy


def softmax_attention(q, k, v, causal, scale):
    scores = q @ k.T * scale
    if causal:
        scores = np.where(np.arange(len(k)) <= np.arange(len(q))[:, None] + len(k) - len(q), scores, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ v


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(0, 70), st.booleans(), st.sampled_from([4, 16]), st.sampled_from([8, 32]))
def test_the_schedule_is_exact_for_any_lengths_and_tiles(seqlen_q, more, causal, rows, columns):
    rng = np.random.default_rng(seqlen_q * 100 + more)
    q, k, v = (rng.normal(size=(n, 8)) * 3 for n in (seqlen_q, seqlen_q + more, seqlen_q + more))
    out, _ = schedule_in_numpy(q, k, v, causal, 0.3, rows, columns)
    np.testing.assert_allclose(out, softmax_attention(q, k, v, causal, 0.3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes_follow_the_loops(head_dim):
    seqlen, columns = 512, BLOCK_COLUMNS[head_dim]
    tensor = np.zeros((seqlen, head_dim))
    _, moved = schedule_in_numpy(tensor, tensor, tensor, False, 1.0, BLOCK_ROWS, columns)
    outer = seqlen // columns
    rows = seqlen * head_dim
    read_kv = 2 * 2 * rows
    read_q = outer * 2 * rows
    statistics = (
        (outer - 1) * 2 * 8 * seqlen
    )  # l and m, fp32, written by all but the last trip and read by all but the first
    partial_output = (outer - 1) * 2 * 4 * rows
    assert moved == read_kv + read_q + partial_output + statistics + 2 * rows


def test_causal_skips_blocks_above_the_diagonal():
    tensor = np.zeros((512, 64))
    full = schedule_in_numpy(tensor, tensor, tensor, False, 1.0, 16, 64)[1]
    causal = schedule_in_numpy(tensor, tensor, tensor, True, 1.0, 16, 64)[1]
    assert 0.5 < causal / full < 0.65


INTERPRETED = """
import torch
from simulator.measure import fa1_triton
for causal, seqlen_k in ((True, 300), (False, 333)):
    q, k, v = (torch.randn(2, n, 64) for n in (100, seqlen_k, seqlen_k))
    workspace = fa1_triton.allocate(q)
    workspace[0].fill_(float("nan"))
    out = fa1_triton.forward(q, k, v, causal, 0.125, workspace)
    scores = q @ k.transpose(1, 2) * 0.125
    if causal:
        hidden = torch.arange(seqlen_k) > torch.arange(100)[:, None] + seqlen_k - 100
        scores = scores.masked_fill(hidden, float("-inf"))
    assert torch.allclose(out, torch.softmax(scores, -1) @ v, atol=1e-5), causal
"""


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "triton")),
    reason="PyTorch and Triton are the optional extra [measure]",
)
def test_triton_kernel_matches_float32_attention_in_the_interpreter():
    """On the CPU, in a process of its own: Triton reads the variable when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
