"""The byte reading: exact SM<->L2 bytes against closed forms, scaling, GQA, and the counted bytes of a real run."""

from dataclasses import replace

import numpy as np
import pytest

from algorithms import MODULES, build_program
from simulator import AttentionProblem, load_profile, simulate
from simulator.accesses import kernel_accesses, padding_read_bytes, sm_traffic, tensor_table, written_tensors
from simulator.errors import InputError
from simulator.overrides import with_values
from simulator.problem import DTYPE_BYTES
from simulator.program import Load, Loop, Store
from simulator.read_sharing import unseen_read_bytes
from simulator.traffic import executed_work, program_traffic

GPU = load_profile("h200_sxm")
MIB = 2**20
#: FA2 splits the keys of small grids, as the library does; closed forms are those of the kernel that does not.
UNSPLIT = AttentionProblem(head_dim=128, num_splits=1)


ALGORITHMS = list(MODULES)


def traffic(algorithm: str, problem: AttentionProblem, gpu=GPU) -> dict[str, tuple[int, int]]:
    """SM<->L2 (read, written) by tensor of the whole program."""
    return program_traffic(build_program(algorithm, problem, gpu))


def matrix_bytes(heads: int, rows: int, cols: int, dtype: str = "bf16") -> int:
    """Size of ``heads`` matrices."""
    return heads * rows * cols * DTYPE_BYTES[dtype]


def tensors_only(sums: dict) -> dict:
    """Without registers spilled to local memory, which the closed forms do not know."""
    return {name: value for name, value in sums.items() if name != "spill"}


def cluster_size(program) -> int:
    """CTAs that share their loads of K and V (TMA multicast)."""
    return max(op.multicast for k in program.kernels for _, _, op in k.walk() if isinstance(op, Load))


# Closed forms --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1024, 1024), (1000, 1000), (333, 2049), (5, 700)])
def test_q_once_o_once_and_k_v_once_per_row_block(algorithm, head_dim, seqlen_q, seqlen_k):
    problem = UNSPLIT.with_(batch=3, heads=4, kv_heads=4, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    problem = problem.with_(head_dim=head_dim, head_dim_v=head_dim)
    program = build_program(algorithm, problem, GPU)
    # the CTAs of a cluster fetch each tile once between them
    row_blocks = -(-seqlen_q // program.attributes["tile"][0]) // cluster_size(program)
    q, kv = matrix_bytes(12, seqlen_q, head_dim), matrix_bytes(12, seqlen_k, head_dim)
    assert tensors_only(program_traffic(program)) == {
        "Q": (q, 0),
        "K": (row_blocks * kv, 0),
        "V": (row_blocks * kv, 0),
        "O": (0, q),
        "LSE": (0, matrix_bytes(12, seqlen_q, 1, "fp32")),
    }


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(2048, 2048), (1000, 1500), (1500, 1000), (200, 3000)])
def test_causal_reads_the_tiles_that_touch_the_diagonal(algorithm, seqlen_q, seqlen_k):
    problem = UNSPLIT.with_(heads=3, kv_heads=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=True)
    program = build_program(algorithm, problem, GPU)
    rows, cols = program.attributes["tile"]
    read = 0
    for block in range(-(-seqlen_q // rows)):
        # bottom-right: the last row of the block sees keys up to this one
        last_key = min(seqlen_k, (block + 1) * rows + seqlen_k - seqlen_q)
        read += min(seqlen_k, -(-max(0, last_key) // cols) * cols)
    got = program_traffic(program)
    assert got["K"] == got["V"] == (3 * read * 128 * 2, 0)
    assert got["Q"] == (matrix_bytes(3, seqlen_q, 128), 0)


def test_causal_approaches_half_the_bytes_from_above():
    dense = UNSPLIT.with_(seqlen_q=32768, seqlen_k=32768)
    full, half = (traffic("fa2", p)["K"][0] for p in (dense, dense.with_(causal=True)))
    assert 0.5 < half / full < 0.51


def test_gqa_reads_the_same_from_l2_and_less_from_memory():
    many = UNSPLIT.with_(batch=2, heads=16, kv_heads=16, seqlen_q=2048, seqlen_k=2048)
    few = many.with_(kv_heads=2)
    for algorithm in ("fa2", "fa3"):
        assert tensors_only(traffic(algorithm, many)) == tensors_only(traffic(algorithm, few))
        assert build_program(algorithm, few, GPU).live_bytes < build_program(algorithm, many, GPU).live_bytes
        a, b = (simulate(algorithm, p, GPU, clock_mhz=1600) for p in (many, few))
        q, kv = matrix_bytes(32, 2048, 128), matrix_bytes(32, 2048, 128)
        # conflicts in L2's sets may cost a few per cent more than what is unique
        assert q + 2 * kv <= a.hbm_read_bytes <= 1.05 * (q + 2 * kv)
        assert q + 2 * kv // 8 <= b.hbm_read_bytes <= 1.05 * (q + 2 * kv // 8)


def test_packed_gqa_reads_k_and_v_once_for_the_group():
    problem = AttentionProblem(batch=4, heads=16, kv_heads=2, seqlen_q=1, seqlen_k=4096, head_dim=128)
    packed = build_program("fa3", problem, GPU)
    assert packed.attributes["pack_gqa"]
    kv = matrix_bytes(4 * 2, 4096, 128)
    assert program_traffic(packed)["K"] == (kv, 0)
    # FA2's forward kernel gives every query head its own CTA
    assert traffic("fa2", problem)["K"] == (8 * kv, 0)


# Scaling -------------------------------------------------------------------------------------------------------------
def exponent(values, sizes) -> float:
    """Slope of log(values) over log(sizes) between the ends."""
    return float(np.log(values[-1] / values[0]) / np.log(sizes[-1] / sizes[0]))


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_bytes_without_a_cache_grow_with_the_square_of_n(algorithm):
    sizes = [4096, 8192, 16384]
    problems = [UNSPLIT.with_(seqlen_q=n, seqlen_k=n) for n in sizes]
    reads = [sum(r for r, _ in traffic(algorithm, p).values()) for p in problems]
    writes = [sum(w for _, w in tensors_only(traffic(algorithm, p)).values()) for p in problems]
    assert exponent(reads, sizes) == pytest.approx(2.0, abs=0.05)
    assert exponent(writes, sizes) == pytest.approx(1.0, abs=1e-9)


def test_bytes_with_a_large_cache_grow_linearly():
    sizes = [4096, 8192, 16384]
    big = with_values(GPU, {"l2_bytes": 4e9})
    for algorithm in ("fa2", "fa3"):
        results = [simulate(algorithm, UNSPLIT.with_(seqlen_q=n, seqlen_k=n), big) for n in sizes]
        assert exponent([r.hbm_read_bytes for r in results], sizes) == pytest.approx(1.0, abs=1e-9)
        assert exponent([r.peak_memory_bytes for r in results], sizes) == pytest.approx(1.0, abs=0.01)


def test_bytes_grow_with_d_at_equal_tiles_and_as_d_squared_over_m_with_the_tile_that_fits():
    """FA2's rows per tile stay 128 from d=64 to d=256: bytes grow with d; SMEM for the tile grows with d too, and a
    tile half as tall (what half the SMEM would hold) reads K and V twice as often."""
    reads = {}
    for d in (64, 128, 256):
        problem = UNSPLIT.with_(seqlen_q=8192, seqlen_k=8192, head_dim=d, head_dim_v=d)
        program = build_program("fa2", problem, GPU)
        reads[d] = program_traffic(program)["K"][0] * program.attributes["tile"][0]
    assert reads[128] == 2 * reads[64]
    assert reads[256] == 4 * reads[64]


def test_batch_and_heads_multiply():
    one = AttentionProblem(heads=2, seqlen_q=777, head_dim=64, causal=True)
    for algorithm in ALGORITHMS:
        if algorithm in ("flash_decoding", "fa1"):
            continue  # their number of splits depends on how many heads there are
        # cuBLAS takes smaller tiles where large ones leave SMs without work
        heads = 12 if algorithm == "standard" else 2
        single = traffic(algorithm, one.with_(heads=heads, kv_heads=heads))
        many = traffic(algorithm, one.with_(batch=3, heads=2 * heads, kv_heads=2 * heads))
        shared = {"mask", "spill", "scheduler_metadata"}
        for name, (read, write) in single.items():
            if name not in shared:
                assert many[name] == (6 * read, 6 * write), (algorithm, name)


# Facts ---------------------------------------------------------------------------------------------------------------
def test_a_score_matrix_of_8192_tokens_is_128_mib():
    assert matrix_bytes(1, 8192, 8192, "fp16") == 128 * MIB
    table = tensor_table(build_program("standard", AttentionProblem(seqlen_q=8192, dtype="fp16"), GPU).kernels)
    assert any(t.bytes == 128 * MIB for t in table.values())


GPT2_MEDIUM = AttentionProblem(batch=64, heads=16, seqlen_q=1024, head_dim=64, dtype="fp16")


def test_gpt2_medium_fused_moves_half_a_gigabyte():
    """Counted on an H200: 0.403 GB read and 0.134 GB written by FA2 forward (what stays dirty is not counted)."""
    result = simulate("fa2", GPT2_MEDIUM, GPU)
    assert result.hbm_read_bytes == pytest.approx(0.403e9, rel=0.01)
    assert result.hbm_write_bytes == pytest.approx(0.134e9, rel=0.15)
    assert result.hbm_read_bytes + result.hbm_write_bytes == pytest.approx(0.537e9, rel=0.05)
    # O and LSE once, and local memory of spilled registers at most once a CTA
    written = result.hbm_write_bytes + result.dirty_bytes_at_end
    o_and_lse = 64 * 16 * 1024 * (64 * 2 + 4)
    spill = next(t for t in build_program("fa2", GPT2_MEDIUM, GPU).tensors().values() if t.name == "spill")
    assert o_and_lse <= written <= o_and_lse + result.kernels[0].ctas * spill.bytes // spill.rows


def test_gpt2_medium_unfused_moves_seventeen_times_as_much():
    """Counted on an H200: 4.70 GB read and 4.42 GB written by unfused attention."""
    result = simulate("standard", GPT2_MEDIUM, GPU)
    moved = result.hbm_read_bytes + result.hbm_write_bytes
    assert moved == pytest.approx(9.12e9, rel=0.1)
    fused = simulate("fa2", GPT2_MEDIUM, GPU)
    assert 12 < moved / (fused.hbm_read_bytes + fused.hbm_write_bytes) < 22


def test_peak_memory_grows_linearly_when_fused_and_quadratically_when_not():
    sizes = [4096, 8192, 16384]
    for algorithm in ALGORITHMS:
        # heads enough that the flash family splits no keys and keeps no partial results
        batch = 1 if algorithm == "standard" else 128
        problems = [AttentionProblem(batch=batch, heads=4, seqlen_q=n, head_dim=64) for n in sizes]
        slope = exponent([build_program(algorithm, p, GPU).live_bytes for p in problems], sizes)
        assert slope == pytest.approx(2.0 if algorithm == "standard" else 1.0, abs=0.1), algorithm


def test_ridge_is_spec_flops_over_spec_bandwidth():
    for gpu, ridge in (("a100_sxm4_80gb", 153), ("h100_sxm", 295), ("h200_sxm", 206)):
        assert load_profile(gpu).ridge_flop_per_byte("bf16") == pytest.approx(ridge, abs=1)


# Work ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_executed_work_is_the_padded_problem(algorithm):
    problem = UNSPLIT.with_(batch=2, heads=3, kv_heads=3, seqlen_q=1000, seqlen_k=900)
    program = build_program(algorithm, problem, GPU)
    rows, cols = program.attributes["tile"]
    padded = -(-1000 // rows) * rows * -(-900 // cols) * cols
    work = executed_work(program.kernels[0])
    assert work["matmul"] == 6 * padded * 4 * 128
    # one exponential a score, and a few a row and block
    assert 6 * padded <= work["exp"] <= 1.1 * 6 * padded
    assert problem.flops() == 6 * 1000 * 900 * 4 * 128 < work["matmul"]


def test_the_causal_work_is_half_and_the_diagonal():
    problem = UNSPLIT.with_(seqlen_q=8192, seqlen_k=8192, causal=True)
    program = build_program("fa2", problem, GPU)
    dense = executed_work(build_program("fa2", problem.with_(causal=False), GPU).kernels[0])
    ratio = executed_work(program.kernels[0])["matmul"] / dense["matmul"]
    assert ratio == pytest.approx(0.5 + 0.5 / (8192 / program.attributes["tile"][0]), rel=1e-6)


# The reading itself --------------------------------------------------------------------------------------------------
def brute_force(kernel) -> dict[str, list[int]]:
    """Bytes by tensor with every loop of every CTA walked."""
    total: dict[str, list[int]] = {}

    def walk(ops, env):
        for op in ops:
            if isinstance(op, Loop):
                for i in range(max(0, int(op.count.at(env)))):
                    walk(op.body, env | {op.var: i})
            elif isinstance(op, Load | Store):
                place = op.source if isinstance(op, Load) else op.into
                if isinstance(op, Load) and op.multicast > 1:
                    share = -(-place.rows // op.multicast)
                    place = replace(place, row=place.row + env["cluster_rank"] * share, rows=share)
                t = place.tensor
                head, row, col = (int(x.at(env)) for x in (place.head, place.row, place.col))
                rows = max(0, min(row + place.rows, t.rows) - max(row, 0))
                cols = max(0, min(col + place.cols, t.cols) - max(col, 0))
                moved = rows * cols * DTYPE_BYTES[t.dtype] * (0 <= head < t.heads)
                total.setdefault(t.name, [0, 0])[isinstance(op, Store)] += moved

    for cta in range(kernel.ctas):
        for role in kernel.roles:
            walk(role.ops, {name: int(values[cta]) for name, values in kernel.coords.items()})
    return total


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(heads=2, seqlen_q=700, seqlen_k=900, head_dim=64, causal=True),
        AttentionProblem(heads=4, kv_heads=2, seqlen_q=130, seqlen_k=257, head_dim=128),
        AttentionProblem(batch=2, heads=4, kv_heads=1, seqlen_q=1, seqlen_k=1500, head_dim=96),
    ],
    ids=["causal", "gqa", "decode"],
)
def test_closed_sums_equal_walking_every_iteration(algorithm, problem):
    try:
        program = build_program(algorithm, problem, GPU)
    except InputError as why:
        pytest.skip(str(why))
    for kernel in program.kernels:
        want = {name: tuple(sums) for name, sums in brute_force(kernel).items()}
        assert sm_traffic(kernel) == want, kernel.name
        assert written_tensors(kernel) == {a.tile.tensor.name for a in kernel_accesses(kernel) if a.is_write}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_results_itemise_the_same_bytes(algorithm):
    problem = AttentionProblem(batch=2, heads=4, seqlen_q=1000, head_dim=64, causal=True)
    program = build_program(algorithm, problem, GPU)
    result = simulate(algorithm, problem, GPU)
    exact = {name: sums for name, sums in program_traffic(program).items() if any(sums)}
    for kernel in program.kernels:
        for sign, part in ((-1, unseen_read_bytes(kernel, GPU)), (1, padding_read_bytes(kernel))):
            for name, size in part.items():
                exact[name] = (exact[name][0] + sign * size, exact[name][1])
    itemised = {
        name: (t.l2_read_bytes, t.l2_write_bytes)
        for name, t in result.traffic_by_tensor().items()
        if t.l2_read_bytes or t.l2_write_bytes
    }
    assert itemised == exact
    assert result.l2_read_bytes == sum(r for r, _ in exact.values())
    assert result.l2_write_bytes == sum(w for _, w in exact.values())
    assert result.executed_flops == sum(executed_work(k)["matmul"] for k in program.kernels)
