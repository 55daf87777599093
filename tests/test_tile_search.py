"""Tiles other than the shipped ones: which are legal, that they compute attention, and what the search chooses."""

from dataclasses import fields

import numpy as np
import pytest

from algorithms import build_program, fa2, fa3
from algorithms.kernel_tables import fa2_forward_tile, fa3_forward_tile
from algorithms.tile_search import (
    TileChoice,
    candidates,
    fa2_accumulators,
    fa2_with,
    fa3_consumer_registers,
    fa3_with,
)
from simulator import AttentionProblem, load_profile, simulate
from simulator.errors import InputError, UnsupportedError
from simulator.reference import attention, random_inputs, run_attention
from simulator.tile_choice import check_tiles, legal_tiles

H100 = load_profile("h100_sxm")
SMALL = AttentionProblem(batch=1, heads=2, seqlen_q=300, seqlen_k=460, head_dim=64, causal=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_every_shipped_fa3_tile_is_legal_and_comes_out_as_it_is(head_dim, causal, dtype):
    """The rules were read off the shipped kernels: from a tile's shape they give its SMEM, registers and turns."""
    problem = AttentionProblem(heads=2, seqlen_q=1024, head_dim=head_dim, causal=causal, dtype=dtype)
    shipped, _ = fa3.forward_tile(problem, H100)
    choice = TileChoice(shipped.tile_m, shipped.tile_n, shipped.kv_stages, shipped.num_mma_warpgroups)
    derived, _ = fa3.forward_tile(problem, H100, choice)
    for field in fields(shipped):
        if field.name != "source":
            assert getattr(derived, field.name) == getattr(shipped, field.name), field.name


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_every_shipped_fa2_tile_is_legal(head_dim, dropout):
    shipped = fa2_forward_tile(head_dim, dropout=dropout, smem_bytes_per_cta_max=232448, smem_bytes_per_sm=233472)
    choice = TileChoice(shipped.tile_m, shipped.tile_n, shipped.kv_stages, shipped.num_warps // 4)
    derived = fa2_with(choice, shipped, H100)
    assert (derived.smem_bytes, derived.threads) == (shipped.smem_bytes, shipped.threads)
    assert choice in candidates("fa2") or head_dim == 32


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("100x64x2x2", "64 rows a warpgroup"),
        ("128x24x2x2", "keys in steps of 16"),
        ("128x272x2x2", "up to 256"),
        ("128x256x2x2", "bytes of SMEM"),
        ("256x128x2x2", "registers"),
        ("512x32x1x8", "threads a CTA"),
    ],
)
def test_an_illegal_fa3_tile_says_which_limit_it_breaks(choice, said):
    problem = AttentionProblem(heads=1, seqlen_q=1024, head_dim=128)
    with pytest.raises(UnsupportedError, match=said):
        fa3.forward_tile(problem, H100, TileChoice.parse(choice))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("72x64x1x1", "16 rows a warp"),
        ("128x72x1x1", "16 keys"),
        ("64x64x7x1", "bytes of SMEM"),
        ("128x128x1x1", "registers a thread"),
    ],
)
def test_an_illegal_fa2_tile_says_which_limit_it_breaks(choice, said):
    problem = AttentionProblem(heads=1, seqlen_q=1024, head_dim=128)
    with pytest.raises(UnsupportedError, match=said):
        fa2.forward_tile(problem, H100, TileChoice.parse(choice))


def test_more_shared_memory_and_registers_make_more_tiles_legal():
    problem = AttentionProblem(heads=1, seqlen_q=1024, head_dim=128)
    today = legal_tiles("fa3", problem, H100)
    more_smem = legal_tiles("fa3", problem, load_profile("h100_sxm", {"sram_per_sm": "512KiB"}))
    more_registers = legal_tiles("fa3", problem, load_profile("h100_sxm", {"registers_per_sm": "x2"}))
    assert set(today) < set(more_smem)
    assert set(today) < set(more_registers)
    assert TileChoice(128, 256, 2, 2) in more_smem and TileChoice(128, 256, 2, 2) not in today


def test_registers_of_consumers_are_those_of_the_shipped_kernels():
    assert [fa3_consumer_registers(groups, 65536) for groups in (1, 2, 3)] == [256, 240, 160]
    assert fa2_accumulators(128, 64, 4, 128) == 192


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_legal_tiles_are_legal_programs(algorithm):
    """Every seventh legal tile builds, fits the SM, and keeps its promise in its attributes."""
    for choice in legal_tiles(algorithm, SMALL, H100)[::7]:
        program = build_program(algorithm, SMALL, H100, tiles=choice)
        kernel = program.kernels[0]
        assert kernel.smem_bytes <= H100.smem_bytes_per_cta_max
        assert program.attributes["tile"] == (choice.tile_m, choice.tile_n)
        assert (program.attributes["stages"], program.attributes["warpgroups"]) == (choice.stages, choice.warpgroups)


@pytest.mark.parametrize(
    ("algorithm", "choice"),
    [("fa2", "64x48x3x1"), ("fa2", "128x32x2x2"), ("fa3", "64x96x3x1"), ("fa3", "256x64x2x2"), ("fa3", "192x80x1x3")],
)
def test_any_tile_computes_the_same_attention(algorithm, choice):
    """The numbers reading does not care about tiles: the schedule with another tile is still exact attention."""
    inputs = random_inputs(SMALL, seed=1)
    exact = attention(SMALL, inputs["Q"], inputs["K"], inputs["V"])["O"]
    got = run_attention(build_program(algorithm, SMALL, H100, tiles=TileChoice.parse(choice)), inputs)["O"]
    assert np.abs(got - exact).max() < 0.02


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("gpu", ["h100_sxm", "h100_2x_smem"])
def test_auto_is_never_slower_and_says_what_it_chose(algorithm, gpu):
    problem = AttentionProblem(batch=2, heads=8, seqlen_q=2048, head_dim=64, causal=True)
    profile = load_profile(gpu)
    shipped = simulate(algorithm, problem, profile)
    auto = simulate(algorithm, problem, profile, tiles="auto")
    assert auto.time_us <= shipped.time_us
    (line,) = [w for w in auto.warnings if w.startswith("tiles: auto")]
    own = TileChoice(*shipped.attributes["tile"], shipped.attributes["stages"], shipped.attributes["warpgroups"])
    assert str(own) in line, "what the shipped kernel uses"
    chosen = TileChoice(*auto.attributes["tile"], auto.attributes["stages"], auto.attributes["warpgroups"])
    assert str(chosen) in line, "what was chosen"
    # asked for by name, the chosen tile is the same program
    if chosen != own:
        assert simulate(algorithm, problem, profile, tiles=str(chosen)).time_us == auto.time_us


@pytest.mark.parametrize(
    ("algorithm", "gpu", "changes", "problem"),
    [
        ("fa3", "h100_sxm", {"sram": "x0.7", "tensor_rate": "x2"}, {"seqlen_q": 2048, "head_dim": 256}),
        ("fa2", "h100_sxm", {"sram": "x0.7", "tensor_rate": "x2"}, {"seqlen_q": 2048, "head_dim": 256}),
        ("fa2", "a100_sxm4_80gb", {}, {"seqlen_q": 1024, "head_dim": 128}),
        ("fa3", "h100_sxm", {}, {"seqlen_q": 2048, "head_dim": 256}),
    ],
)
def test_auto_chooses_what_trying_every_legal_tile_chooses(algorithm, gpu, changes, problem):
    """A tenth to a third of the tiles are simulated; none of the others is more than 0.5 % faster."""
    asked = AttentionProblem(batch=2, heads=8, causal=True, **problem)
    profile = load_profile(gpu, changes)
    auto = simulate(algorithm, asked, profile, tiles="auto", event_budget=15_000)
    times = [
        simulate(algorithm, asked, profile, tiles=str(choice), event_budget=15_000).time_us
        for choice in legal_tiles(algorithm, asked, profile)
    ]
    assert auto.time_us <= 1.005 * min(times)
    assert max(times) > 1.2 * min(times), "the choice must matter for the comparison to mean anything"


def test_auto_takes_bigger_tiles_where_memory_and_registers_allow_and_bytes_bind():
    """L2 bandwidth binds: K and V are read once for each block of rows, and with twice the SMEM and registers a CTA
    holds more of them."""
    problem = AttentionProblem(batch=2, heads=8, seqlen_q=2048, head_dim=128, causal=True)
    slow_l2 = {"l2_bandwidth": "x0.4"}
    shipped = simulate("fa3", problem, load_profile("h100_sxm", slow_l2))
    more = load_profile("h100_sxm", slow_l2 | {"sram_per_sm": "x2", "registers_per_sm": "x2"})
    chosen = simulate("fa3", problem, more, tiles="auto", event_budget=10_000)
    assert chosen.attributes["tile"][0] > shipped.attributes["tile"][0]
    assert chosen.l2_read_bytes < 0.8 * shipped.l2_read_bytes
    assert chosen.time_us < 0.9 * shipped.time_us


def test_auto_says_where_fa1_has_tiles_that_grow():
    """The paper's blocks: twice the SRAM, about half the trips of O through HBM."""
    problem = AttentionProblem(batch=1, heads=4, seqlen_q=2048, head_dim=128)
    searched = simulate("fa1", problem.with_(seqlen_q=512, seqlen_k=512), H100, tiles="auto")
    assert any("fa1:flash_attn_1_sram takes the paper's blocks" in line for line in searched.warnings)
    ruled = simulate("fa1", problem, H100, implementation="flash_attn_1_sram", tiles="auto")
    assert any("the paper's rule, Bc = M/4d" in line for line in ruled.warnings)
    today, twice = (
        simulate("fa1", problem, gpu, implementation="flash_attn_1_sram")
        for gpu in (H100, load_profile("h100_sxm", {"sram_per_sm": "x2"}))
    )
    assert twice.attributes["tile"][1] == 2 * today.attributes["tile"][1]
    ratio = (twice.l2_read_bytes + twice.l2_write_bytes) / (today.l2_read_bytes + today.l2_write_bytes)
    assert 0.45 < ratio < 0.6


def test_auto_finds_a_tile_where_the_shipped_kernel_does_not_fit():
    problem = AttentionProblem(batch=1, heads=4, seqlen_q=1024, head_dim=128)
    small = load_profile("h100_sxm", {"sram_per_sm": "100KiB"})
    with pytest.raises(UnsupportedError, match="bytes of SMEM"):
        simulate("fa3", problem, small)
    found = simulate("fa3", problem, small, tiles="auto")
    assert any("the shipped kernel does not fit" in w for w in found.warnings)
    with pytest.raises(UnsupportedError, match="no legal tile of fa3 fits"):
        simulate("fa3", problem, load_profile("h100_sxm", {"sram_per_sm": "10KiB"}), tiles="auto")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "128",
        "128x64",
        "128x64x2",
        "ax64x2x2",
        "128x64x2x0",
        "-1x64x2x2",
        "automatic",
        "fwd=",
        "fwd=auto",
        "fwd=64x64x1x1,fwd=64x64x1x1",
    ],
)
def test_what_is_no_tile_is_refused(text):
    with pytest.raises(InputError, match=r"is not a tile|given twice"):
        check_tiles(text)


def test_tiles_are_read_as_written():
    assert check_tiles(" 128X64x2x2 ") == "128x64x2x2"
    assert check_tiles("auto") == "auto"
    assert check_tiles("kernel") is None and check_tiles(None) is None
    assert check_tiles("bwd=64x128x2x2, fwd = 128x64x1x1") == "bwd=64x128x2x2,fwd=128x64x1x1"


def test_a_derived_tile_keeps_the_rest_of_the_kernel():
    shipped = fa3_forward_tile(128, row_blocks=8)
    assert shipped.cluster_m == 2
    assert fa3_with(TileChoice(128, 96, 3, 2), shipped, 2, H100, row_blocks=8).cluster_m == 2
    assert fa3_with(TileChoice(128, 96, 3, 2), shipped, 2, H100, row_blocks=7).cluster_m == 1
