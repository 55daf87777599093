"""What surrounds FA3's e4m3 kernel: scales per tensor or per block, and incoherent processing (FA3 paper, section 3.3).

``S_ij = (scale_q,i scale_k,j) Q_i K_j^T`` with one scale a block is exact and costs the kernel nothing: the factor
goes into the constant that exp's argument is multiplied by anyway. Incoherent processing multiplies Q and K by the
same random orthogonal matrix before they are quantised, which leaves Q K^T alone and spreads outliers.

Used by the numbers reading only: :func:`fp8_error` runs the tile program of :mod:`algorithms.fa3` on quantised inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from simulator.numbers import run_program
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import Await, Buffer, Compute, Index, Kernel, Load, Loop, Op, Program, Role, Tensor, tile, var
from simulator.reference import attention
from simulator.tile_ops import TILE_OPS, TileOp, round_to

E4M3_MAX = 448.0
# folded into constants that the kernel multiplies by anyway
TILE_OPS["descale"] = TileOp(lambda a, p: a[0] * a[1], {"fma": 0.0})


def quantise(x: np.ndarray, block_rows: int | None) -> tuple[np.ndarray, np.ndarray]:
    """``x`` ``[heads, rows, cols]`` on e4m3's grid and its scales ``[heads, rows, 1]``: ``x = scale * quantised``.

    One scale for the whole tensor (``block_rows`` None) or one for each head's ``block_rows`` rows.
    """
    heads, rows, _ = x.shape
    largest = np.abs(x).max(axis=2, keepdims=True)
    scales = np.full((heads, rows, 1), largest.max(), np.float32)
    if block_rows is not None:
        for start in range(0, rows, block_rows):
            block = slice(start, start + block_rows)
            scales[:, block] = largest[:, block].max(axis=1, keepdims=True)
    scales = np.maximum(scales / np.float32(E4M3_MAX), np.float32(1e-30))
    return round_to((x / scales).astype(np.float32), "fp8"), scales


def rotation(size: int, seed: int) -> np.ndarray:
    """Random signs times a Hadamard matrix: orthogonal ``[size, size]`` (``size`` a power of two)."""
    if size & (size - 1):
        raise ValueError(f"a Hadamard matrix of {size} rows does not exist here: give a power of two")
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size)
    return np.asarray(signs[:, None] * h / np.sqrt(size))


def _scaled_role(role: Role, rows: list[Index], q_scale: Tensor, k_scale: Tensor, v_scale: Tensor) -> Role:
    """A consumer that multiplies S by its block's scales once it exists, and P by V's before it is rounded.

    ``rows``: the first key of the block that the ops outside loops, then each loop, work on.
    """
    block_rows = next(
        op.rows
        for op in role.ops
        if isinstance(op, Compute) and op.fn == "fill" and isinstance(op.out, Buffer) and op.out.name == "m"
    )
    index = int(role.name.removeprefix("warpgroup"))
    of_q = Buffer("q_scale", block_rows)
    of_k, of_v = Buffer("k_scale", 1), Buffer("v_scale", 1)

    def change(ops: Iterable[Op], row: Index) -> list[Op]:
        out: list[Op] = []
        for op in ops:
            out.append(op)
            if isinstance(op, Await) and op.token == "S":
                s = Buffer("S", block_rows, tile_n)
                out += [
                    Load(tile(k_scale, var("kv_head"), row, 1), of_k, via="ld"),
                    Load(tile(v_scale, var("kv_head"), row, 1), of_v, via="ld"),
                    Compute("descale", s, (s, of_q), block_rows, tile_n),
                    Compute("descale", s, (s, of_k), block_rows, tile_n),
                ]
            if isinstance(op, Compute) and op.fn == "accumulate_sum":
                weights = op.args[2]
                assert isinstance(weights, Buffer)
                out.append(Compute("descale", weights, (weights, of_v), weights.rows, weights.cols))
        return out

    tile_n = next(
        op.cols for loop in role.ops if isinstance(loop, Loop) for op in loop.body
        if isinstance(op, Compute) and op.fn == "exp"
    )  # fmt: skip
    load_q = Load(tile(q_scale, var("q_head"), var("row0") + index * block_rows, block_rows), of_q, via="ld")
    outside = rows[0]
    loops = iter(rows[1:])
    ops: list[Op] = [load_q]
    straight: list[Op] = []
    for op in role.ops:
        if isinstance(op, Loop):
            ops += change(straight, outside)
            straight = []
            ops.append(replace(op, body=tuple(change(op.body, next(loops)))))
        else:
            straight.append(op)
    return replace(role, ops=tuple([*ops, *change(straight, outside)]))


def with_scales(program: Program) -> Program:
    """FA3's e4m3 forward ``program`` with inputs ``Q_scale``, ``K_scale``, ``V_scale`` (one value a row) as well."""
    q, k, v = (program.inputs[n] for n in "QKV")
    scales = [
        Tensor(f"{t.name}_scale", t.heads, t.rows, 1, "fp32", "input", packed_group=t.packed_group) for t in (q, k, v)
    ]

    def adapt(kernel: Kernel) -> Kernel:
        loader, *consumers = kernel.roles

        def key_row(ops: Iterable[Op]) -> Index:
            return next(op.source.row for op in ops if isinstance(op, Load) and op.source.tensor.name == "K")

        rows = [key_row(loader.ops), *(key_row(op.body) for op in loader.ops if isinstance(op, Loop))]
        return replace(kernel, roles=(loader, *(_scaled_role(role, rows, *scales) for role in consumers)))

    kernels = tuple(adapt(k) if k.name == "flash_fwd_sm90" else k for k in program.kernels)
    return replace(program, kernels=kernels, inputs={**program.inputs, **{t.name: t for t in scales}})


def fp8_error(
    problem: AttentionProblem,
    gpu: Profile,
    inputs: dict[str, np.ndarray],
    per_block: bool,
    incoherent: bool,
    seed: int = 0,
) -> float:
    """RMS difference between FA3's e4m3 output and float64 attention on the unquantised ``inputs``.

    ``inputs``: Q, K, V ``[heads, rows, head_dim]`` in full precision; equal numbers of query and KV heads.
    """
    from algorithms import build_program

    program = build_program("fa3", problem, gpu)
    tile_m, tile_n = program.attributes["tile"]
    q, k, v = (np.asarray(inputs[n], np.float32) for n in "QKV")
    want = attention(problem, q, k, v)["O"]
    if incoherent:
        spread = rotation(problem.head_dim, seed)
        q, k = ((x.astype(np.float64) @ spread).astype(np.float32) for x in (q, k))
    given, factor = {}, 1.0
    for name, x, rows in (("Q", q, tile_m), ("K", k, tile_n), ("V", v, tile_n)):
        given[name], scale = quantise(x, rows if per_block else None)
        if name == "V":
            # P is scaled by V's scale relative to the largest, which itself is applied to O
            factor = float(scale.max())
            scale = scale / np.float32(factor)
        given[f"{name}_scale"] = scale
    got = run_program(with_scales(program), given)["O"].astype(np.float64) * factor
    return float(np.sqrt(((got - want) ** 2).mean()))
