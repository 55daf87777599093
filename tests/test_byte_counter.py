"""Bytes of whole runs against a counter of its own: the papers' loops in plain Python, every element marked.

Nothing of the program's readings is used. From the program come the tile sizes, the number of splits and slices, how
many CTAs share a load (TMA multicast), and the grids of unfused attention's products: choices of a library, not of an
algorithm. Every load and store of a loop
adds its bytes between SM and L2; what it reads first, or writes first, adds to the bytes that memory moves under an
L2 that holds everything.
"""

from dataclasses import replace

import numpy as np
import pytest

from algorithms import MODULES, build_program
from simulator import AttentionProblem, load_profile, simulate
from simulator.accesses import padding_read_bytes
from simulator.overrides import with_values
from simulator.program import Load, Loop, Store
from simulator.traffic import program_traffic

#: Every SM asks for itself: which neighbours share a read in L2 is a matter of timing.
GPU = with_values(load_profile("h200_sxm"), {"l2_read_sharers": 1})
ENDLESS = with_values(GPU, {"l2_bytes": 1e12})
#: Not of the algorithm: registers that a compiler spills, a scheduler's counter of tiles.
NOT_COUNTED = {"spill", "scheduler_metadata"}
IO, FP32 = 2, 4
Rows = range
MOST_HEADS, MOST_ROWS = 64, 2048


def blocks(length: int, size: int, first: int = 0) -> list[Rows]:
    """``first`` to ``length`` in blocks of ``size``, the last one cut."""
    return [range(at, min(at + size, length)) for at in range(first, length, size)]


class Counter:
    """Bytes by tensor: moved between SM and L2, and those of elements that are touched for the first time."""

    def __init__(self, problem: AttentionProblem):
        self.p = problem
        self.moved: dict[str, list[int]] = {}
        self.first: dict[str, list[int]] = {}
        self.touched: dict[str, np.ndarray] = {}

    def _touch(self, write: bool, name: str, head: int, rows: Rows, cols: int, size: int) -> None:
        count = len(rows) * cols * size
        if not count:
            return
        self.moved.setdefault(name, [0, 0])[write] += count
        # [was read, was written] by head and row: no loop here moves part of a row
        seen = self.touched.setdefault(name, np.zeros((2, MOST_HEADS, MOST_ROWS), bool))
        at = slice(rows.start, rows.stop)
        fresh = ~seen[1, head, at] if write else ~(seen[0, head, at] | seen[1, head, at])
        self.first.setdefault(name, [0, 0])[write] += int(fresh.sum()) * cols * size
        seen[int(write), head, at] = True

    def load(self, name: str, head: int, rows: Rows, cols: int, size: int = IO) -> None:
        self._touch(False, name, head, rows, cols, size)

    def store(self, name: str, head: int, rows: Rows, cols: int, size: int = IO) -> None:
        self._touch(True, name, head, rows, cols, size)

    def all_of(self, write: bool, name: str, heads: int, rows: int, cols: int, size: int = IO, times: int = 1) -> None:
        """A whole tensor, ``times`` times."""
        for _ in range(times):
            for head in range(heads):
                self._touch(write, name, head, range(rows), cols, size)

    # Which keys and queries see each other, bottom right ------------------------------------------------------------
    def last_key(self, query: int) -> int:
        """Keys before this one are seen by ``query``."""
        p = self.p
        return min(p.seqlen_k, query + 1 + p.seqlen_k - p.seqlen_q) if p.causal else p.seqlen_k

    def keys_of(self, rows: Rows, size: int, queries_per_row: int = 1) -> list[Rows]:
        """Key blocks with a key that a query of ``rows`` sees (of rows packed by group: the last one's query)."""
        limit = self.last_key(rows[-1] // queries_per_row)
        return [keys for keys in blocks(self.p.seqlen_k, size) if keys.start < limit]

    def rows_of(self, keys: Rows, size: int, always: bool = False) -> list[Rows]:
        """Query blocks with a query that sees a key of ``keys``."""
        return [rows for rows in blocks(self.p.seqlen_q, size) if always or keys.start < self.last_key(rows[-1])]


def sharers(kernel, tensor: str) -> int:
    """CTAs of a cluster that fetch a tile of ``tensor`` once between them."""
    loads = [op for *_, op in kernel.walk() if isinstance(op, Load) and op.source.tensor.name == tensor]
    return max(op.multicast for op in loads)


def expand(c: Counter, name: str) -> None:
    """K or V copied for every query head of its group (kernels without grouped heads)."""
    p = c.p
    c.all_of(False, name, p.batch * p.kv_heads, p.seqlen_k, p.head_dim, times=p.group)
    c.all_of(True, f"{name}_expanded", p.batch * p.heads, p.seqlen_k, p.head_dim)


def sum_groups(c: Counter, name: str) -> None:
    """dK or dV of every query head summed over its group."""
    p = c.p
    c.all_of(False, f"{name}_expanded", p.batch * p.heads, p.seqlen_k, p.head_dim)
    c.all_of(True, name, p.batch * p.kv_heads, p.seqlen_k, p.head_dim)


# FlashAttention-2 and -3, forward (Dao 2023, Algorithm 1) -------------------------------------------------------------
def flash_forward(c: Counter, program) -> None:
    """For every row block: Q once, K and V of the key blocks it sees, O and the LSE once. The first CTA of a cluster
    fetches for the others."""
    p, d = c.p, c.p.head_dim
    br, bc = program.attributes["tile"]
    group = p.group if program.attributes.get("pack_gqa") else 1
    cluster = sharers(program.kernels[-1], "K")
    assert cluster == 1 or not p.causal
    for kv_head in range(p.batch * p.kv_heads):
        for head in [kv_head] if group > 1 else range(kv_head * p.group, (kv_head + 1) * p.group):
            for i, rows in enumerate(blocks(p.seqlen_q * group, br)):
                c.load("Q", head, rows, d)
                for keys in c.keys_of(rows, bc, group) if i % cluster == 0 else ():
                    c.load("K", kv_head, keys, d)
                    c.load("V", kv_head, keys, d)
                c.store("O", head, rows, d)
                c.store("LSE", head, rows, 1, FP32)


# FlashDecoding: the same over a part of the keys, and a second kernel that weighs the parts ---------------------------
def split_forward(c: Counter, program) -> None:
    p, d = c.p, c.p.head_dim
    br, bc = program.attributes["tile"]
    splits, group = program.attributes["num_splits"], p.group if program.attributes["pack_gqa"] else 1
    heads, kv_heads = p.batch * p.heads // group, p.batch * p.kv_heads
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        for rows in blocks(p.seqlen_q * group, br):
            seen = c.keys_of(rows, bc, group)
            share = -(-len(seen) // splits)
            for split in range(splits):
                c.load("Q", head, rows, d)
                for keys in seen[split * share : (split + 1) * share]:
                    c.load("K", kv_head, keys, d)
                    c.load("V", kv_head, keys, d)
                # parts one after another, each with rows of its own
                c.store("O_partial", head + split * heads, rows, d, FP32)
                c.store("LSE_partial", head + split * heads, rows, 1, FP32)
    everything = heads, p.seqlen_q * group
    for split in range(splits):
        for head in range(heads):
            c.load("O_partial", head + split * heads, range(everything[1]), d, FP32)
            c.load("LSE_partial", head + split * heads, range(everything[1]), 1, FP32)
    c.all_of(True, "O", *everything, d)
    c.all_of(True, "LSE", *everything, 1, FP32)


# FlashAttention-1, forward (Dao et al. 2022, Algorithm 1) -------------------------------------------------------------
def fa1_forward(c: Counter, program) -> None:
    """For every key block (outer) the row blocks that see it: Q again, O and its statistics from and to memory.

    A row block that sees no key is visited at the first key block, to write zeros. Of ``row_slices`` CTAs a head each
    takes every so manieth row block, and loads the key blocks that its rows see.
    """
    p, d = c.p, c.p.head_dim
    br, bc = program.attributes["tile"]
    slices = program.attributes["row_slices"]
    packaged = program.implementation == "flash_attn_1"
    k, v = ("K_expanded", "V_expanded") if p.group > 1 else ("K", "V")
    if p.group > 1:
        expand(c, "K")
        expand(c, "V")
    visits = [c.rows_of(keys, br, always=keys.start == 0) for keys in blocks(p.seqlen_k, bc)]
    last_visit = {rows.start: j for j, visiting in enumerate(visits) for rows in visiting}
    for head in range(p.batch * p.heads):
        for j, keys in enumerate(blocks(p.seqlen_k, bc)):
            for _slice in {rows.start // br % slices for rows in visits[j]}:
                c.load(k, head, keys, d)
                c.load(v, head, keys, d)
            for rows in visits[j]:
                final = last_visit[rows.start] == j
                c.load("Q", head, rows, d)
                if j > 0:
                    c.load("O_tmp", head, rows, d, FP32)
                c.store("O" if final else "O_tmp", head, rows, d, IO if final else FP32)
                # 1.x keeps the LSE, Algorithm 1 the maximum and the sum, which nobody needs at the end
                for name in ("LSE",) if packaged else ("m", "l"):
                    if j > 0:
                        c.load(name, head, rows, 1, FP32)
                    if packaged or not final:
                        c.store(name, head, rows, 1, FP32)


# Backward (FlashAttention-2: Dao 2023, Algorithm 2; FlashAttention-1: Dao et al. 2022, Algorithm 4) -------------------
def flash2_backward(c: Counter, program) -> None:
    """K and V of a key block once; Q, dO, LSE and D of every query block that sees it; dQ added in fp32 in L2."""
    p, d = c.p, c.p.head_dim
    br, bc = program.attributes["backward_tile"]
    # FA3's copy of the LSE (base 2), and both kernels' D and dQ in fp32, reach to the end of a tile
    lse, hopper = ("LSE_log2", True) if program.algorithm == "fa3" else ("LSE", False)
    padded, padded_k = (-(-n // size) * size for n, size in ((p.seqlen_q, br), (p.seqlen_k, bc)))
    accumulated = [f"{name}_accum" for name in ("dK", "dV") if hopper and p.group > 1]
    for name in accumulated:
        c.all_of(True, name, p.batch * p.kv_heads, padded_k, d, FP32)
    for head in range(p.batch * p.heads):
        c.load("dO", head, range(p.seqlen_q), d)
        c.load("O", head, range(p.seqlen_q), d)
        c.store("D", head, range(padded), 1, FP32)
        c.store("dQ_accum", head, range(padded), d, FP32)
        if hopper:
            c.load("LSE", head, range(p.seqlen_q), 1, FP32)
            c.store(lse, head, range(padded), 1, FP32)
    for head in range(p.batch * p.heads):
        for keys in blocks(p.seqlen_k, bc):
            c.load("K", head // p.group, keys, d)
            c.load("V", head // p.group, keys, d)
            for rows in c.rows_of(keys, br):
                whole = range(rows.start, rows.start + br)
                c.load("Q", head, rows, d)
                c.load("dO", head, rows, d)
                c.load(lse, head, whole if hopper else rows, 1, FP32)
                c.load("D", head, whole, 1, FP32)
                c.store("dQ_accum", head, whole, d, FP32)
            for name in ("dK", "dV"):
                if p.group == 1:
                    c.store(name, head, keys, d)
                elif hopper:
                    c.store(f"{name}_accum", head // p.group, range(keys.start, keys.start + bc), d, FP32)
                else:
                    c.store(f"{name}_expanded", head, keys, d)
    c.all_of(False, "dQ_accum", p.batch * p.heads, padded, d, FP32)
    c.all_of(True, "dQ", p.batch * p.heads, p.seqlen_q, d)
    for name in ("dK", "dV") if p.group > 1 else ():
        if hopper:
            c.all_of(False, f"{name}_accum", p.batch * p.kv_heads, padded_k, d, FP32)
            c.all_of(True, name, p.batch * p.kv_heads, p.seqlen_k, d)
        else:
            sum_groups(c, name)


def fa1_backward(c: Counter, program) -> None:
    """Key blocks one after another: dQ in fp32 from and to memory, D made from O at the first. Or side by side: D from
    a kernel before, dQ zeroed, added in L2 and copied."""
    p, d = c.p, c.p.head_dim
    br, bc = program.attributes["backward_tile"]
    parallel = program.attributes["key_blocks_in_parallel"]
    heads, suffix = p.batch * p.heads, "_expanded" if p.group > 1 else ""
    if p.group > 1:
        expand(c, "K")
        expand(c, "V")
    if parallel:
        c.all_of(True, "dQ_tmp", heads, p.seqlen_q, d, FP32)
        c.all_of(False, "dO", heads, p.seqlen_q, d)
        c.all_of(False, "O", heads, p.seqlen_q, d)
        c.all_of(True, "D", heads, p.seqlen_q, 1, FP32)
    walks = [c.rows_of(keys, br, always=not parallel and keys.start == 0) for keys in blocks(p.seqlen_k, bc)]
    last_visit = {rows.start: j for j, walk in enumerate(walks) for rows in walk}
    for head in range(heads):
        for j, keys in enumerate(blocks(p.seqlen_k, bc)):
            c.load(f"K{suffix}", head, keys, d)
            c.load(f"V{suffix}", head, keys, d)
            for rows in walks[j]:
                for name in ("Q", "dO"):
                    c.load(name, head, rows, d)
                c.load("LSE", head, rows, 1, FP32)
                if parallel or j > 0:
                    c.load("D", head, rows, 1, FP32)
                else:
                    c.load("O", head, rows, d)
                    c.store("D", head, rows, 1, FP32)
                if not parallel and j > 0:
                    c.load("dQ_tmp", head, rows, d, FP32)
                done = not parallel and last_visit[rows.start] == j
                c.store("dQ" if done else "dQ_tmp", head, rows, d, IO if done else FP32)
            c.store(f"dK{suffix}", head, keys, d)
            c.store(f"dV{suffix}", head, keys, d)
    if parallel:
        c.all_of(False, "dQ_tmp", heads, p.seqlen_q, d, FP32)
        c.all_of(True, "dQ", heads, p.seqlen_q, d)
    for name in ("dK", "dV") if p.group > 1 else ():
        sum_groups(c, name)


# Unfused attention: S = Q K^T, P = softmax(S), O = P V, every matrix through memory -----------------------------------
def product(c: Counter, program, kernel: str, a: tuple, b: tuple, out: tuple) -> None:
    """A product of matrices ``(name, heads, rows, cols)``: A once for every column of the grid's tiles, B for every
    row of them (once for each of the output's heads)."""
    launch = next(k for k in program.kernels if k.name == kernel)
    down, across = (len(np.unique(launch.coords[name])) for name in ("row0", "col0"))
    c.all_of(False, *a, times=across // sharers(launch, a[0]))
    c.all_of(False, *b, times=down * out[1] // b[1] // sharers(launch, b[0]))
    c.all_of(True, *out)


def standard_forward(c: Counter, program) -> None:
    p, d, heads = c.p, c.p.head_dim, c.p.batch * c.p.heads
    k, v = ("K_expanded", "V_expanded") if p.group > 1 else ("K", "V")
    if p.group > 1:
        expand(c, "K")
        expand(c, "V")
    queries, keys = (heads, p.seqlen_q, d), (heads, p.seqlen_k, d)
    scores = heads, p.seqlen_q, p.seqlen_k
    product(c, program, "qk_gemm", ("Q", *queries), (k, *keys), ("S", *scores))
    if p.causal:
        # one mask for every head, added into a matrix of its own
        c.all_of(False, "S", *scores)
        c.all_of(False, "mask", 1, *scores[1:], times=heads)
        c.all_of(True, "S_masked", *scores)
    c.all_of(False, "S_masked" if p.causal else "S", *scores)
    c.all_of(True, "P", *scores)
    product(c, program, "pv_gemm", ("P", *scores), (v, *keys), ("O", *queries))


def standard_backward(c: Counter, program) -> None:
    p, d, heads = c.p, c.p.head_dim, c.p.batch * c.p.heads
    queries, keys, own = (heads, p.seqlen_q, d), (heads, p.seqlen_k, d), (p.batch * p.kv_heads, p.seqlen_k, d)
    scores, suffix = (heads, p.seqlen_q, p.seqlen_k), "_expanded" if p.group > 1 else ""
    product(c, program, "dv_gemm", ("P", *scores), ("dO", *queries), (f"dV{suffix}", *keys))
    product(c, program, "dp_gemm", ("dO", *queries), ("V", *own), ("dP", *scores))
    for inputs, output in ((("dP", "P"), "dPP"), (("P", "dPP"), "dS")):
        for name in inputs:
            c.all_of(False, name, *scores)
        c.all_of(True, output, *scores)
    product(c, program, "dq_gemm", ("dS", *scores), ("K", *own), ("dQ", *queries))
    product(c, program, "dk_gemm", ("dS", *scores), ("Q", *queries), (f"dK{suffix}", *keys))
    for name in ("dK", "dV") if p.group > 1 else ():
        sum_groups(c, name)


COUNTERS = {
    ("standard", "fwd"): standard_forward,
    ("standard", "bwd"): standard_backward,
    ("fa1", "fwd"): fa1_forward,
    ("fa1", "bwd"): fa1_backward,
    ("fa2", "fwd"): flash_forward,
    ("fa2", "bwd"): flash2_backward,
    ("fa3", "fwd"): flash_forward,
    ("fa3", "bwd"): flash2_backward,
    ("flash_decoding", "fwd"): split_forward,
}
SHAPES = {
    "one-head": dict(heads=1, seqlen_q=512, head_dim=128),
    "causal-odd": dict(batch=2, heads=3, kv_heads=3, seqlen_q=301, head_dim=64, causal=True),
    "gqa-odd": dict(heads=8, kv_heads=2, seqlen_q=257, seqlen_k=419, head_dim=64),
    "causal-gqa-more-keys": dict(batch=2, heads=4, kv_heads=1, seqlen_q=130, seqlen_k=777, head_dim=128, causal=True),
    "causal-more-queries": dict(heads=2, seqlen_q=700, seqlen_k=333, head_dim=128, causal=True),
}
DECODE = {
    "one-query": dict(batch=2, heads=8, kv_heads=2, seqlen_q=1, seqlen_k=1900, head_dim=128, num_splits=4),
    "some-queries": dict(heads=4, kv_heads=1, seqlen_q=5, seqlen_k=1111, head_dim=64, causal=True, num_splits=3),
}
CASES = [
    (f"{algorithm}:{implementation}", pass_, shape)
    for algorithm, pass_, implementations in (
        ("standard", "fwd", ("torch_eager",)),
        ("standard", "bwd", ("torch_eager",)),
        ("fa1", "fwd", ("flash_attn_1", "flash_attn_1_paper")),
        ("fa1", "bwd", ("flash_attn_1", "flash_attn_1_paper")),
        ("fa2", "fwd", ("torch_flash",)),
        ("fa2", "bwd", ("torch_flash",)),
        ("fa3", "fwd", ("flash_attn_3", "flash_attn_3_2024")),
        ("fa3", "bwd", ("flash_attn_4_sm90",)),
        ("flash_decoding", "fwd", ("torch_flash_splitkv", "flash_attn_3_kvcache")),
    )
    for implementation in implementations
    for shape in (DECODE if algorithm == "flash_decoding" else SHAPES)
]


def built(case, gpu=GPU):
    """The problem of a case and its program."""
    name, pass_, shape = case
    algorithm, _, implementation = name.partition(":")
    problem = AttentionProblem(pass_=pass_, **({"num_splits": 1} | (SHAPES | DECODE)[shape]))
    return problem, build_program(algorithm, problem, gpu, implementation)


def counted(problem: AttentionProblem, program) -> Counter:
    counter = Counter(problem)
    COUNTERS[program.algorithm, problem.pass_](counter, program)
    return counter


def test_every_algorithm_and_pass_is_counted():
    assert {algorithm for algorithm, _ in COUNTERS} == set(MODULES)
    assert {(name.partition(":")[0], pass_) for name, pass_, _ in CASES} == set(COUNTERS)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_run_moves_what_the_papers_loops_move(case):
    problem, program = built(case)
    counter = counted(problem, program)
    result = simulate(program.algorithm, problem, ENDLESS, implementation=program.implementation, clock_mhz=1300)
    got = {n: t for n, t in result.traffic_by_tensor().items() if n not in NOT_COUNTED}
    # rows behind a tensor's end, which TMA asks of L2 and fills with zeros, are no loop's
    padding = dict.fromkeys(got, 0)
    for kernel in program.kernels:
        for n, asked in padding_read_bytes(kernel).items():
            padding[n] += asked
    assert {n: [t.l2_read_bytes - padding[n], t.l2_write_bytes] for n, t in got.items()} == counter.moved
    # an L2 that keeps everything: memory gives what is read first, and what is written stays
    first_read = {n: read for n, (read, _) in counter.first.items() if read}
    assert {n: t.hbm_read_bytes for n, t in got.items() if t.hbm_read_bytes} == first_read
    others = sum(t.bytes for n, t in program.tensors().items() if n in NOT_COUNTED)
    assert 0 <= result.dirty_bytes_at_end - sum(written for _, written in counter.first.values()) <= others


@pytest.mark.parametrize("case", [c for c in CASES if c[2] in ("causal-gqa-more-keys", "some-queries")], ids="-".join)
def test_each_load_and_store_counts(case):
    """A program without one of its loads or stores moves other bytes."""
    problem, program = built(case)
    want = counted(problem, program).moved
    names = {place(op).tensor.name for k in program.kernels for *_, op in k.walk() if isinstance(op, Load | Store)}
    assert names - NOT_COUNTED == set(want)
    for name in sorted(names - NOT_COUNTED):
        for kind in (Load, Store):
            mutant = without(program, kind, name)
            if mutant is not None:
                assert moved_by(mutant) != want, (kind, name)
    assert moved_by(program) == want


def place(op: Load | Store):
    return op.source if isinstance(op, Load) else op.into


def moved_by(program) -> dict[str, list[int]]:
    return {n: list(m) for n, m in program_traffic(program).items() if n not in NOT_COUNTED and any(m)}


def without(program, kind: type, name: str):
    """``program`` without its operations of ``kind`` on tensor ``name`` (``None``: it has none)."""

    def kept(ops):
        for op in ops:
            if isinstance(op, Loop):
                yield replace(op, body=tuple(kept(op.body)))
            elif not (isinstance(op, kind) and place(op).tensor.name == name):
                yield op

    kernels = tuple(
        replace(k, roles=tuple(replace(r, ops=tuple(kept(r.ops))) for r in k.roles)) for k in program.kernels
    )
    return None if kernels == program.kernels else replace(program, kernels=kernels)
