"""What one tile operation costs on one SM: cycles of work on each pipe, as data for the event engine.

Compiling drops everything that has no bearing on time (tensors, positions), so equal schedules on
different problem sizes compile to equal programs and share one simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import fsum

from simulator.physics import Physics
from simulator.problem import DTYPE_BYTES
from simulator.profile import Profile
from simulator.program import (
    Acquire,
    Await,
    Barrier,
    Compute,
    Consume,
    Exchange,
    Fetch,
    Index,
    Instructions,
    Kernel,
    Load,
    Loop,
    Matmul,
    Op,
    Pipe,
    Release,
    Signal,
    Store,
    Wait,
    view,
)
from simulator.tile_ops import work_of

#: Pipes of one SM: execution pipes, and the ports from and to L2.
PIPES = ("tensor", "exp", "fp32", "alu", "issue", "smem", "port", "port_out")
#: Pipes that serve transfers in order of arrival; the others are shared equally.
TRANSFER_PIPES = ("port", "port_out")
#: FLOP a cycle and SM that the register ports allow mma.sync (H200, micro_run1.csv mma_sync_bf16; the same elsewhere).
MMA_SYNC_PORT_FLOP = 2550.0
#: Cycles from one mma.sync m16n8k16 to the next one that adds to the same accumulator, where no other one of the
#: warp hides it (H200: 25.0 with one accumulator, 12.8 with two, 6.5 with four).
MMA_SYNC_CHAIN_CYCLES = 25.0
#: Code that an SM holds near its schedulers, and the pace at which a warp gets code that is not there. H200, counters
#: of FA2 launches: kernels of up to 58 KB miss 2 KB a warp, of 67 and 80 KB with a causal mask 14 to 22, of 110 to 117
#: KB 40 to 63; a request for 80 bytes that misses costs its warp 28 cycles.
INSTRUCTION_CACHE_BYTES = 64 << 10
FETCH_CYCLES_PER_BYTE = 28 / 80
#: Code that is nearest to the schedulers, and the pace at which it is read from the next level: loops of up to 28 KB run
#: freely, the one of 37 KB (FA2 at head dim 64 with a window, random_run1 and builds_run1) loses 4.7 thousand cycles an
#: iteration.
NEAR_INSTRUCTION_CACHE_BYTES = 32 << 10
NEAR_FETCH_BYTES_PER_CYCLE = 10.0
#: Parts of an operation below this share of its longest part hide in it and cost no event of their own.
NEGLIGIBLE_SHARE = 0.05
PIPE_INDEX = {name: i for i, name in enumerate(PIPES)}
#: Bytes of SMEM, or of L1, that its port moves in a cycle at most: a wavefront.
SMEM_LINE_BYTES = 128
#: What a waiting instruction stream waits for.
CAUSES = ("tensor", "exp", "fp32", "smem", "memory", "latency")


@dataclass(frozen=True)
class SmSpec:
    """The rates of one SM that the engine needs (per cycle), with the physical parameters applied."""

    fma: float
    alu: float
    exp: float
    convert: float
    issue_lanes: float
    smem_bytes: float
    port_bytes: float
    atomic_bytes: float
    tensor_flop: float
    tensor_efficiency: float
    is_wgmma: bool
    matmul_latency: float
    warp_issue_rate: float
    mixed_issue_efficiency: float
    tensor_issue_share: float
    elementwise_latency: float
    barrier_latency: float
    #: Cycles from one instruction of a warp to the next beside exponentials, where its compiled code was looked at.
    issue_interval: float = 0.0

    @classmethod
    def of(cls, profile: Profile, physics: Physics, path: str, dtype: str) -> SmSpec:
        """The rates of ``profile``'s SM for tensor instructions of ``path`` on ``dtype`` operands."""
        wgmma = path != "mma_sync"
        tensor_flop = profile.tensor_rate(path, dtype)
        return cls(
            fma=profile.fma_per_cycle_per_sm,
            alu=profile.alu_per_cycle_per_sm,
            exp=profile.exp_per_cycle_per_sm * physics.exp_efficiency,
            convert=profile.convert_per_cycle_per_sm,
            issue_lanes=32 * profile.issue_slots_per_cycle_per_sm * physics.issue_efficiency,
            smem_bytes=profile.smem_bandwidth_bytes_per_cycle_per_sm * physics.smem_efficiency,
            atomic_bytes=physics.atomic_bytes_per_cycle_per_sm,
            port_bytes=profile.l2_to_sm_bandwidth_bytes_per_cycle_per_sm,
            tensor_flop=tensor_flop,
            tensor_efficiency=physics.wgmma_efficiency if wgmma else physics.mma_sync_efficiency,
            is_wgmma=wgmma,
            matmul_latency=physics.matmul_latency_cycles if wgmma else physics.mma_sync_latency_cycles,
            warp_issue_rate=physics.warp_issue_rate,
            mixed_issue_efficiency=physics.mixed_issue_efficiency / physics.issue_efficiency,
            tensor_issue_share=physics.wgmma_issue_share if wgmma else _mma_sync_share(physics, tensor_flop),
            elementwise_latency=physics.elementwise_latency_cycles,
            barrier_latency=physics.barrier_latency_cycles,
        )


def _mma_sync_share(physics: Physics, tensor_flop: float) -> float:
    """Issue slots that mma.sync takes while the tensor cores are busy with it.

    Its operands and accumulators pass through the registers' ports, which on an H200 is what bounds it
    (``MMA_SYNC_PORT_FLOP``). Where the tensor cores themselves are slower, the ports are free in between.
    """
    return physics.mma_sync_issue_share * min(1.0, tensor_flop / MMA_SYNC_PORT_FLOP)


@dataclass(frozen=True)
class Timed:
    """A compiled operation: ``kind``, cycles of work by pipe index, extra latency, and what its waiter waits for.

    ``minimum`` is the least time in cycles that the role itself needs (fewer than four warps cannot use all
    sub-partitions). ``key`` names a pipe, token, barrier or semaphore; ``number`` is its stages or parties. ``paced``:
    the work advances as one stream (:mod:`simulator.warp_streams`) whose ``minimum`` consists of these cycles by cause.
    """

    kind: str
    work: tuple[tuple[int, float], ...] = ()
    latency: float = 0.0
    minimum: float = 0.0
    cause: str = "latency"
    key: str = ""
    number: int = 1
    consumers: int = 1
    paced: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class TimedLoop:
    """A compiled loop: its trip count as an affine expression of trip coordinates."""

    count: Index
    var: str
    body: tuple[TimedOp, ...]


TimedOp = Timed | TimedLoop
#: A role of a CTA: its name, its warps and what it does.
TimedRole = tuple[str, int, tuple[TimedOp, ...]]


def _matmul_work(op: Matmul, warps: int, spec: SmSpec) -> list[tuple[int, float]]:
    m, n, k = op.mnk
    a, b = view(op.a), view(op.b)
    flop = 2.0 * m * n * k
    a_bytes, b_bytes = m * k * DTYPE_BYTES[a.dtype], n * k * DTYPE_BYTES[b.dtype]
    if spec.is_wgmma:
        instructions_m = -(-m // 64)
        ideal = 2.0 * 64 * instructions_m * n * k / spec.tensor_flop
        # an m64nNk16 instruction takes N/2 cycles but never less than 16 + N/4 (LUO, UT in hardware.md)
        tensor = ideal * max(1.0, (16 + n / 4) / (n / 2)) if n < 64 else ideal
        smem = b_bytes * instructions_m + (a_bytes if a.space == "smem" else 0)
    else:
        tensor = flop / spec.tensor_flop
        # split by rows: every warp reads all of b; by columns: every warp reads all of a
        smem = b_bytes * (warps if op.split == "rows" else 1) if b.space == "smem" else 0
        smem += a_bytes * (warps if op.split == "cols" else 1) if a.space == "smem" else 0
    tensor /= spec.tensor_efficiency
    return [
        (PIPE_INDEX["tensor"], tensor),
        # accumulators and fragments pass through the register file: other instructions lose these slots
        (PIPE_INDEX["issue"], tensor * spec.tensor_issue_share),
        (PIPE_INDEX["smem"], smem / spec.smem_bytes),
    ]


def _lane_work(lanes: Mapping[str, float], spec: SmSpec) -> dict[str, float]:
    """Cycles by pipe of lane-operations by unit. Conversions run on the ALU's ports; everything takes an issue slot."""
    convert = lanes.get("convert", 0.0)
    cycles = {
        "fp32": lanes.get("fma", 0.0) / spec.fma,
        "alu": lanes.get("alu", 0.0) / spec.alu + convert / spec.convert,
        "exp": lanes.get("exp", 0.0) / spec.exp,
        "issue": fsum(amount for unit, amount in lanes.items() if unit != "wavefronts") / spec.issue_lanes,
        "smem": lanes.get("wavefronts", 0.0) * SMEM_LINE_BYTES / spec.smem_bytes,
    }
    return {pipe: amount for pipe, amount in cycles.items() if amount > 0}


def _compute_work(lanes: Mapping[str, float], warps: int, spec: SmSpec) -> tuple[list[tuple[int, float]], float, str]:
    cycles = _lane_work(lanes, spec)
    # an SM sub-partition's warps of this role issue at most this share of its slots; fewer than four warps leave
    # sub-partitions idle
    share = min(1.0, warps / 4)
    issue = cycles.get("issue", 0.0) / min(1.0, spec.warp_issue_rate * max(1.0, warps / 4))
    minimum = max(max(cycles.values(), default=0.0), issue) / share
    plain = cycles.get("fp32", 0.0) + cycles.get("alu", 0.0)
    cause = "exp" if cycles.get("exp", 0.0) >= plain and cycles.get("exp", 0.0) > 0 else "fp32"
    return [(PIPE_INDEX[p], c) for p, c in cycles.items()], minimum, cause


def _paced(work: Iterable[tuple[int, float]], warps: int, spec: SmSpec) -> tuple[tuple[str, float], ...]:
    """Cycles by cause of a warp's stream alone: its exponentials, its other issue slots, and what they wait between."""
    cycles = dict(work)
    alone = max(1.0, warps / 4) * min(1.0, warps / 4)
    slots, exp = (cycles.get(PIPE_INDEX[name], 0.0) / alone for name in ("issue", "exp"))
    return ("exp", exp), ("fp32", slots), ("latency", slots * (spec.issue_interval - 1.0))


def _compile_op(op: Op, warps: int, spec: SmSpec) -> TimedOp:
    if isinstance(op, Loop):
        return TimedLoop(op.count, op.var, compile_ops(op.body, warps, spec))
    if isinstance(op, Load):
        target = view(op.into)
        work = [(PIPE_INDEX["port"], op.source.bytes * op.overfetch / op.multicast / spec.port_bytes)]
        if target.space == "smem":
            work.append((PIPE_INDEX["smem"], op.source.bytes / spec.smem_bytes))
        is_pipe = isinstance(target.source, Pipe)
        kind = "load_pipe" if is_pipe else ("load_async" if op.token else "load")
        return Timed(kind, tuple(work), cause="memory", key=target.source.name if is_pipe else (op.token or ""))
    if isinstance(op, Store) and op.accumulate:
        # reductions are posted, but L2 takes them slowly: the next ones wait until the queue has drained
        cycles = op.into.bytes / spec.atomic_bytes
        return Timed("reduce", ((PIPE_INDEX["port_out"], cycles),), cause="memory")
    if isinstance(op, Store):
        cycles = op.into.bytes / spec.port_bytes
        return Timed("store", ((PIPE_INDEX["port_out"], cycles),), cause="memory")
    if isinstance(op, Acquire):
        return Timed("acquire", key=op.pipe.name, number=op.pipe.stages, consumers=op.pipe.consumers, cause="memory")
    if isinstance(op, Consume):
        return Timed("consume", key=op.pipe.name, latency=spec.barrier_latency, cause="memory")
    if isinstance(op, Release):
        return Timed("release", key=op.pipe.name)
    if isinstance(op, Matmul):
        work = _matmul_work(op, warps, spec)
        parts = dict(work)
        # tensor cores that are fast enough wait for their operands
        cause = "tensor" if parts[PIPE_INDEX["tensor"]] >= parts[PIPE_INDEX["smem"]] else "smem"
        if op.token is not None:
            return Timed("matmul_async", tuple(work), spec.matmul_latency, key=op.token, cause=cause)
        k = op.mnk[2] / (warps if op.split == "inner" else 1)
        chain = 0.0 if spec.is_wgmma else k / 16 * MMA_SYNC_CHAIN_CYCLES
        return Timed("matmul", tuple(work), spec.matmul_latency, chain, cause=cause)
    if isinstance(op, Await):
        return Timed("await", key=op.token, cause="tensor")
    if isinstance(op, Exchange):
        cycles = (op.bytes_written + op.bytes_read) / spec.smem_bytes
        return Timed("work", ((PIPE_INDEX["smem"], cycles),), spec.barrier_latency, cause="smem")
    if isinstance(op, Fetch):
        if op.again:
            looped = op.code_bytes if op.code_bytes > NEAR_INSTRUCTION_CACHE_BYTES else 0
            return Timed("work", (), looped / op.times / NEAR_FETCH_BYTES_PER_CYCLE)
        missing = max(0, op.code_bytes - INSTRUCTION_CACHE_BYTES) / op.times
        return Timed("work", (), missing * FETCH_CYCLES_PER_BYTE)
    if isinstance(op, Barrier):
        latency = spec.barrier_latency * _barrier_share(warps * op.parties)
        return Timed("barrier", key=op.name, number=op.parties, latency=latency)
    if isinstance(op, Wait):
        return Timed("wait", key=op.name, latency=spec.barrier_latency)
    if isinstance(op, Signal):
        return Timed("signal", key=op.name)
    raise TypeError(f"no cost rule for {type(op).__name__}")


def _barrier_share(warps: int) -> float:
    """Latency of a barrier of ``warps`` over that of one of eight (H200, micro_run1.csv barrier: 20.6, 28.5, 36.5 and
    76.5 cycles for 4, 8, 12 and 32 warps)."""
    return (12.6 + 2.0 * warps) / (12.6 + 2.0 * 8)


#: Row reductions: what follows them needs their result for every element.
_REDUCTIONS = frozenset({"row_max", "row_sum", "row_dot"})


def compile_ops(ops: Iterable[Op], warps: int, spec: SmSpec) -> tuple[TimedOp, ...]:
    """``ops`` as timed operations; element-wise ones in a row run as one stream up to the next row reduction."""
    compiled: list[TimedOp] = []
    stream: dict[str, float] = {}

    def flush() -> None:
        if stream:
            work, minimum, cause = _compute_work(stream, warps, spec)
            if work:
                if spec.issue_interval:
                    parts = _paced(work, warps, spec)
                    minimum = max(minimum, sum(part for _, part in parts))
                    compiled.append(Timed("work", tuple(work), 0.0, minimum, cause, paced=parts))
                    stream.clear()
                    return
                # more than one warp on a sub-partition: the others' instructions hide the latency of each
                busy = max(max(cycles for _, cycles in work), minimum)
                latency = max(0.0, spec.elementwise_latency - busy * (1.0 - 1.0 / max(1.0, warps / 4)))
                compiled.append(Timed("work", tuple(work), latency, minimum, cause))
            stream.clear()

    for op in ops:
        if isinstance(op, Compute | Instructions):
            lanes = work_of(op.fn, op.rows, op.cols) if isinstance(op, Compute) else dict(op.work)
            for unit, amount in lanes.items():
                stream[unit] = stream.get(unit, 0.0) + amount
            if isinstance(op, Compute) and op.fn in _REDUCTIONS:
                flush()
            continue
        flush()
        compiled.append(_compile_op(op, warps, spec))
    flush()
    return tuple(_without_negligible(op) for op in compiled)


def _without_negligible(op: TimedOp) -> TimedOp:
    if isinstance(op, TimedLoop) or op.kind not in ("work", "matmul", "matmul_async"):
        return op
    longest = max((cycles for _, cycles in op.work), default=0.0)
    return replace(op, work=tuple(part for part in op.work if part[1] > NEGLIGIBLE_SHARE * longest))


def compile_kernel(kernel: Kernel, spec: SmSpec) -> tuple[TimedRole, ...]:
    """Each role of one CTA of ``kernel`` as ``(name, warps, timed operations)``."""
    compiled = []
    for role in kernel.roles:
        own = spec
        if role.paced:
            own = replace(spec, issue_interval=role.issue_interval_cycles, warp_issue_rate=1.0)
        elif role.issue_interval_cycles:
            # counted, dependent operations' latencies included
            lanes = spec.issue_lanes * spec.mixed_issue_efficiency
            rate = min(spec.warp_issue_rate, 1.0 / role.issue_interval_cycles) / spec.mixed_issue_efficiency
            own = replace(spec, issue_lanes=lanes, warp_issue_rate=min(1.0, rate), elementwise_latency=0.0)
        ops = compile_ops(role.ops, role.warps, own)
        compiled.append((role.name, role.warps, _shared(ops, kernel.ctas_each) if kernel.ctas_each > 1 else ops))
    return tuple(compiled)


def _shared(ops: Iterable[TimedOp], ctas: int) -> tuple[TimedOp, ...]:
    """One CTA's share of timed operations whose work is that of ``ctas``."""
    return tuple(
        replace(op, body=_shared(op.body, ctas))
        if isinstance(op, TimedLoop)
        else replace(
            op,
            work=tuple((pipe, c / ctas) for pipe, c in op.work),
            minimum=op.minimum / ctas,
            paced=tuple((cause, c / ctas) for cause, c in op.paced),
        )
        for op in ops
    )
