"""``--tiles`` beyond the forward kernels of FA2 and FA3: backward passes, FA1, decode, unfused attention's products."""

from dataclasses import fields

import numpy as np
import pytest

from algorithms import build_program, tile_spaces
from algorithms.backward_tiles import fa2_backward_with, fa3_backward_with
from algorithms.fa1_schedule import schedule_for
from algorithms.fa2_backward import WARP_ROWS
from algorithms.gemm_tiles import choice_of, gemm_with, shipped_kernel
from algorithms.kernel_tables import fa2_backward_tile, fa3_backward_tile
from algorithms.tile_search import TileChoice, TileSpace
from simulator import AttentionProblem, load_profile, simulate
from simulator.errors import UnsupportedError
from simulator.reference import attention, attention_gradients, backward_inputs, random_inputs, run_attention

H100, A100, B200 = (load_profile(name) for name in ("h100_sxm", "a100_sxm4_80gb", "b200"))
SMALL = AttentionProblem(batch=1, heads=2, seqlen_q=300, seqlen_k=456, head_dim=64, causal=True)
DECODE = AttentionProblem(batch=2, heads=8, kv_heads=2, seqlen_q=1, seqlen_k=3000, head_dim=128, causal=True)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_shipped_fa2_backward_tiles_are_legal_by_the_rules_read_off_them(head_dim):
    """As a choice apart from the shipped one (V in SMEM), each gives the same SMEM, and fits the same register rule."""
    shipped = fa2_backward_tile(head_dim, smem_bytes_per_cta_max=232448)
    # another number of buffers, so that the rules are asked
    other = TileChoice(shipped.tile_m, shipped.tile_n, 3 - shipped.q_stages, 2)
    derived = fa2_backward_with(other, shipped, WARP_ROWS[head_dim, shipped.tile_n], H100)
    one_buffer = 2 * shipped.tile_m * head_dim * (derived.q_stages - shipped.q_stages)
    if not shipped.v_in_registers:
        assert derived.smem_bytes == shipped.smem_bytes + one_buffer
    assert derived.ctas_per_sm >= shipped.ctas_per_sm


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_shipped_fa3_backward_tiles_are_legal_and_come_out_as_they_are(head_dim, causal):
    shipped = fa3_backward_tile(head_dim, causal=causal)
    choice = TileChoice(shipped.tile_m, shipped.tile_n, shipped.q_stages, 2)
    nearly = fa3_backward_tile(head_dim, causal=not causal)
    # from the other mask's tile, so that the rules are asked where the two differ
    derived = fa3_backward_with(choice, nearly, H100)
    for field in fields(shipped):
        if field.name not in ("source", "helpers"):
            assert getattr(derived, field.name) == getattr(shipped, field.name), field.name
    rows = {h.name: h.rows_per_cta for h in shipped.helpers}
    assert {h.name: h.rows_per_cta for h in derived.helpers} == rows


@pytest.mark.parametrize(
    ("algorithm", "changes", "choice", "said"),
    [
        ("fa2", {"pass_": "bwd"}, "64x128x2x1", "2 warpgroups"),
        ("fa2", {"pass_": "bwd"}, "48x128x2x2", "padded to 128"),
        ("fa2", {"pass_": "bwd"}, "128x128x2x2", "registers a thread"),
        ("fa2", {"pass_": "bwd"}, "64x72x2x2", "16 rows and 8 columns a warp"),
        ("fa3", {"pass_": "bwd"}, "64x64x2x2", "keys in steps of 128"),
        ("fa3", {"pass_": "bwd"}, "128x128x2x2", "registers a thread"),
        ("fa3", {"pass_": "bwd"}, "64x128x3x2", "one or two buffers"),
        ("fa1", {}, "16x100x2x1", "16 keys a warp"),
        ("fa1", {}, "16x256x2x1", "registers a thread"),
        ("fa1", {}, "16x128x3x1", "2 buffers of Q"),
        ("fa1", {"pass_": "bwd"}, "16x128x2x1", "8 warps"),
        ("standard", {}, "100x256x4x2", "one side in steps of 64"),
        ("flash_decoding", {"seqlen_q": 1}, "128x256x2x2", "registers|SMEM"),
    ],
)
def test_an_illegal_tile_says_which_limit_it_breaks(algorithm, changes, choice, said):
    problem = AttentionProblem(heads=8, **{"seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 128} | changes)
    parts = tile_spaces(algorithm, problem, H100, None)
    with pytest.raises(UnsupportedError, match=said):
        build_program(algorithm, problem, H100, tiles={next(iter(parts)): TileChoice.parse(choice)})


@pytest.mark.parametrize(
    ("algorithm", "choice"),
    [("fa1", "32x64x2x1"), ("fa1", "16x384x2x2"), ("standard", "scores=128x128x4x2,output=64x64x6x1")],
)
def test_any_forward_tile_computes_the_same_attention(algorithm, choice):
    inputs = random_inputs(SMALL, seed=1)
    exact = attention(SMALL, inputs["Q"], inputs["K"], inputs["V"])["O"]
    got = run_attention(_built(algorithm, SMALL, choice), inputs)["O"]
    assert np.abs(got - exact).max() < 0.02


@pytest.mark.parametrize(
    ("algorithm", "gpu", "choice"),
    [
        ("fa1", H100, "16x128x2x2"),
        ("fa2", H100, "64x64x1x2"),
        ("fa2", H100, "128x64x2x2"),
        ("fa2", A100, "128x96x1x2"),
        ("fa3", H100, "64x128x1x2"),
        ("standard", H100, "grad_value=64x128x3x2,grad_key=256x64x4x2"),
    ],
)
def test_any_backward_tile_computes_the_same_gradients(algorithm, gpu, choice):
    problem = SMALL.with_(pass_="fwd_bwd")
    inputs = backward_inputs(problem, seed=2)
    exact = attention_gradients(problem, *(inputs[name] for name in ("Q", "K", "V", "dO")))
    choice = choice if "=" in choice else f"bwd={choice}"
    got = run_attention(_built(algorithm, problem, choice, gpu), inputs)
    for name, gradient in exact.items():
        assert np.abs(got[name] - gradient).max() < 0.03 * np.abs(gradient).max(), name


@pytest.mark.parametrize(("gpu", "choice"), [(H100, "64x128x3x1"), (H100, "64x64x2x1"), (A100, "64x64x2x1")])
def test_any_decode_tile_computes_the_same_attention(gpu, choice):
    inputs = random_inputs(DECODE, seed=3)
    exact = attention(DECODE, inputs["Q"], inputs["K"], inputs["V"])["O"]
    got = run_attention(_built("flash_decoding", DECODE, choice, gpu), inputs)["O"]
    assert np.abs(got - exact).max() < 0.02


def _built(algorithm, problem, choice, gpu=H100):
    parts = dict(item.split("=") for item in choice.split(",")) if "=" in choice else None
    if parts is None:
        return build_program(algorithm, problem, gpu, tiles=TileChoice.parse(choice))
    return build_program(algorithm, problem, gpu, tiles={part: TileChoice.parse(t) for part, t in parts.items()})


def test_every_shipped_product_is_legal_by_its_own_rule():
    """Asked as a choice with one slice fewer, the tile that cuBLAS takes keeps its shape and fits."""
    for gpu in (H100, A100):
        for role, pass_ in (("scores", "fwd"), ("output", "fwd"), ("grad_value", "bwd"), ("grad_scores", "bwd")):
            for head_dim in (64, 128):
                problem = AttentionProblem(batch=2, heads=16, seqlen_q=2048, head_dim=head_dim, pass_=pass_)
                own = choice_of(shipped_kernel(role, problem, gpu))
                other = TileChoice(own.tile_m, own.tile_n, own.stages - 1, own.warpgroups)
                derived = gemm_with(other, role, problem, gpu)
                assert (derived.tile_rows, derived.tile_columns, derived.stages) == (
                    own.tile_m,
                    own.tile_n,
                    other.stages,
                )
                assert derived.threads == shipped_kernel(role, problem, gpu).threads


def test_more_registers_and_memory_make_larger_products_legal():
    problem = AttentionProblem(batch=2, heads=8, seqlen_q=1024, head_dim=128)
    more = load_profile("h100_sxm", {"sram": "x2", "registers_per_sm": "x2"})
    with pytest.raises(UnsupportedError, match="registers"):
        gemm_with(TileChoice(512, 160, 4, 4), "output", problem, H100)
    assert gemm_with(TileChoice(512, 160, 4, 4), "output", problem, more).tile_rows == 512


@pytest.mark.parametrize(
    ("algorithm", "gpu", "changes"),
    [
        ("fa2", H100, {"pass_": "bwd", "seqlen_q": 1024}),
        ("fa3", H100, {"pass_": "bwd", "seqlen_q": 1024}),
        ("fa3", H100, {"pass_": "fwd_bwd", "seqlen_q": 512}),
        ("fa1", H100, {"seqlen_q": 512, "causal": False}),
        ("flash_decoding", A100, {"seqlen_q": 1, "seqlen_k": 4096}),
        ("standard", A100, {"seqlen_q": 512}),
    ],
)
def test_auto_is_never_slower_says_what_it_chose_and_can_be_asked_for(algorithm, gpu, changes):
    problem = AttentionProblem(batch=2, heads=8, head_dim=128, causal=True).with_(**changes)
    problem = problem if "seqlen_k" in changes else problem.with_(seqlen_k=problem.seqlen_q)
    shipped = simulate(algorithm, problem, gpu)
    auto = simulate(algorithm, problem, gpu, tiles="auto")
    assert auto.time_us <= shipped.time_us
    spaces = tile_spaces(algorithm, problem, gpu, None)
    lines = [w for w in auto.warnings if w.startswith("tiles: ")]
    for part, space in spaces.items():
        assert isinstance(space, TileSpace)
        (line,) = [w for w in lines if len(spaces) == 1 or w.startswith(f"tiles: {part} ")]
        assert "auto chose" in line or "auto keeps" in line
        assert space.shipped_says in line, "what the shipped kernel uses"
    chosen = auto.attributes.get("tiles", {})
    assert all(str(choice) in " ".join(lines) for choice in chosen.values())
    if chosen:
        asked = ",".join(f"{part}={choice}" for part, choice in chosen.items())
        assert simulate(algorithm, problem, gpu, tiles=asked).time_us == auto.time_us


@pytest.mark.parametrize(
    ("algorithm", "gpu", "changes", "implementation", "said"),
    [
        ("standard", B200, {}, None, "Blackwell's kernels"),
        ("standard", H100, {"seqlen_k": 511}, None, "no multiple of 16 bytes"),
        ("fa3", H100, {"pass_": "fwd_bwd"}, "cudnn_sm90", "cuDNN's kernels are closed"),
        ("fa1", H100, {}, "flash_attn_1_paper", "counted at 16x256 only"),
        (
            "flash_decoding",
            H100,
            {"kv_heads": 1, "seqlen_q": 1, "head_dim": 576, "head_dim_v": 512},
            None,
            "MLA's kernel",
        ),
    ],
)
def test_a_kernel_that_leaves_no_choice_says_why_and_stays_as_it_is(algorithm, gpu, changes, implementation, said):
    problem = AttentionProblem(**{"heads": 4, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 64} | changes)
    own = simulate(algorithm, problem, gpu, implementation=implementation)
    same = simulate(algorithm, problem, gpu, implementation=implementation, tiles="auto")
    assert same.time_us == own.time_us
    lines = [w for w in same.warnings if w.startswith("tiles: ")]
    assert lines and all("nothing to choose" in line and said in line for line in lines)
    with pytest.raises(UnsupportedError, match=r"is fixed|say which"):
        simulate(algorithm, problem, gpu, implementation=implementation, tiles="128x64x2x2")


def test_a_call_of_two_passes_takes_tiles_by_pass():
    problem = AttentionProblem(batch=1, heads=2, seqlen_q=512, head_dim=64, pass_="fwd_bwd")
    with pytest.raises(UnsupportedError, match="2 parts here; say which, such as fwd=128x64x1x1,bwd="):
        simulate("fa2", problem, H100, tiles="128x64x1x1")
    with pytest.raises(UnsupportedError, match="no part 'fdw' here; did you mean 'fwd'"):
        simulate("fa2", problem, H100, tiles="fdw=128x64x1x1")
    both = simulate("fa2", problem, H100, tiles="fwd=64x64x1x1,bwd=64x64x1x2")
    assert both.attributes["tile"] == (64, 64)
    assert both.attributes["backward_tile"] == (64, 64)


def test_auto_takes_larger_fa1_blocks_where_registers_allow_and_hbm_binds():
    """FA1 sends O through HBM once a key block: with four times the registers and a slow HBM, wider blocks pay."""
    problem = AttentionProblem(batch=2, heads=8, seqlen_q=1024, head_dim=128)
    slow = load_profile("h100_sxm", {"hbm_bandwidth": "x0.1", "l2_bytes": "x0.1", "registers_per_sm": "x2"})
    shipped = simulate("fa1", problem, slow)
    chosen = simulate("fa1", problem, slow, tiles="auto", event_budget=10_000)
    assert chosen.attributes["tile"][1] > shipped.attributes["tile"][1]
    assert chosen.hbm_read_bytes < 0.8 * shipped.hbm_read_bytes
    assert chosen.time_us < 0.9 * shipped.time_us


def test_fa1_with_another_tile_has_its_own_slices_and_residency():
    problem = AttentionProblem(batch=2, heads=8, seqlen_q=1024, head_dim=64)
    wide = schedule_for(problem, "flash_attn_1", H100, TileChoice(16, 512, 2, 2))
    assert (wide.keys, wide.warps, wide.ctas_per_sm) == (512, 8, 1)
