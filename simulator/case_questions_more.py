"""More of the public cases' questions: bounds that the model derives, what-ifs, and those that it does not take."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

from algorithms import build_program
from simulator.accesses import sm_traffic
from simulator.errors import InputError, UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile, load_profile
from simulator.program import Store
from simulator.result import Result
from simulator.simulation import simulate

Answer = tuple[str, str, str, str]
_DECODE = "flash_attn_3_kvcache"


def _yes(right: bool) -> str:
    return "yes" if right else "no"


def _decode(problem: AttentionProblem, gpu: str, clock_mhz: float | None = None) -> Result:
    return simulate("flash_decoding", problem, load_profile(gpu), implementation=_DECODE, clock_mhz=clock_mhz)


def padded_rows() -> Answer:
    problem = AttentionProblem(128, 128, 16, 1, 16384, 128, dtype="fp16", page_size=128)
    h20, h100 = (_decode(problem, gpu) for gpu in ("h20", "h100_sxm"))
    padding = h20.executed_flops / h20.flops
    text = f"{padding:.0f}x padded work; H20 waits for {h20.limiter}, H100 for {h100.limiter}"
    return text, "", _yes(padding == 16 and h20.limiter == "tensor" and h100.limiter == "hbm"), "128 rows for 8 queries"


def over_splitting() -> Answer:
    problem = AttentionProblem(32, 32, 8, 1, 4096, 128, dtype="fp16")
    chosen, many = (_decode(problem.with_(num_splits=splits), "h200_sxm", 1500).time_us for splits in (None, 16))
    text = f"{chosen:.0f} us with the library's splits, {many:.0f} us with 16"
    return text, "", _yes(chosen < many / 1.2), "FA3 in place of TileLang: the cache is 0.54 GB either way"


def low_bandwidth_is_right() -> Answer:
    gpu = load_profile("h20")
    result = _decode(AttentionProblem(128, 64, 1, 8, 8192, 576, 512, causal=True), "h20")
    rate = result.hbm_read_bytes / result.time_us / 1e3
    text = f"{rate:.0f} GB/s, waits for {result.limiter}; ridge at {gpu.ridge_flop_per_byte('bf16'):.0f} FLOP/byte"
    return text, "", _yes(result.limiter == "tensor" and rate < 200), "compute-bound, not broken"


def drawn_lengths() -> Answer:
    draw = random.Random(0)
    lengths = tuple(max(1, round(draw.normalvariate(4096, 2048))) for _ in range(128))
    problem = AttentionProblem(128, 16, 1, 1, 4096, 576, 512)
    whole = _decode(problem, "h100_sxm").time_us
    ragged = _decode(problem.with_(seqlen_k=max(lengths), seqlens_k=lengths), "h100_sxm").time_us
    per_key = ragged / sum(lengths) / (whole / (128 * 4096))
    note = "lengths drawn as its test does (normal, half the mean wide); FA3's split order in place of FlashMLA's"
    return f"x{per_key:.2f} time a key", "", _yes(1.0 < per_key < 1.2), note


def unsplit_mla() -> Answer:
    one, six = (
        _decode(AttentionProblem(1, 64, 1, queries, 640, 576, 512, num_splits=1), "h100_sxm") for queries in (1, 6)
    )
    busy = max(kernel.ctas for kernel in six.kernels)
    text = f"{one.time_us:.1f} us for 1 query, {six.time_us:.1f} us for 6"
    note = f"dense FA3 on an H100 in its place: one CTA's walk over the keys, {busy} of 132 SMs at work"
    return text, "", _yes(abs(six.time_us / one.time_us - 1) < 0.05), note


def _implied_clock_mhz(problem: AttentionProblem, gpu: str, measured_us: float) -> float:
    """The SM clock at which the model takes the measured time of a problem that memory does not bound."""
    return simulate("fa3", problem, load_profile(gpu), clock_mhz=1500).time_us * 1500 / measured_us


def clock_of_the_pcie_card() -> Answer:
    measured = {1024: 566.0, 2048: 1845.0, 4096: 7094.0, 8192: 27230.0}
    clocks = [
        _implied_clock_mhz(AttentionProblem(16, 32, 32, n, n, 64, dtype="fp16"), "h100_pcie", time_us)
        for n, time_us in measured.items()
    ]
    falling = all(later <= earlier for earlier, later in pairwise(clocks))
    text = "at " + ", ".join(f"{clock:.0f}" for clock in clocks) + " MHz (1k to 8k)"
    return (
        text,
        "",
        _yes(falling and clocks[-1] < 1620),
        "falls with length below its 1620 MHz: its 350 W, not modelled",
    )


def clock_of_the_slow_box() -> Answer:
    slow = _implied_clock_mhz(AttentionProblem(8, 16, 16, 8192, 8192, 128, dtype="fp16"), "h100_sxm", 9450.0)
    reference = _implied_clock_mhz(AttentionProblem(4, 48, 48, 8192, 8192, 128, dtype="fp16"), "h100_sxm", 10321.0)
    text = f"at {slow:.0f} MHz, the reference at {reference:.0f}"
    return text, "", _yes(slow < 0.8 * reference), "another machine: no problem's shape explains it"


def dq_reduction() -> Answer:
    program = build_program("fa3", AttentionProblem(1, 1, 1, 16384, 16384, 256, pass_="bwd"), load_profile("h200_sxm"))
    kernel = next(k for k in program.kernels if k.name == "flash_bwd_sm90")
    written = sm_traffic(kernel)["dQ_accum"][1]
    keys = program.attributes["backward_tile"][1]
    note = f"S^2 D 4 bytes over the {keys} keys of its tile; 3.4 GB with the thread's 80"
    return f"{written / 1e9:.2f} GB a head", "", _yes(abs(written * keys / (16384**2 * 256 * 4) - 1) < 0.01), note


def exp_ceiling() -> Answer:
    gpu = load_profile("b200")
    at_64, at_128 = (gpu.exp_per_cycle_per_sm * gpu.num_sms * gpu.spec_clock_hz * 4 * d / 1e15 for d in (64, 128))
    text = f"{at_64:.2f} PFLOP/s at D=64, {at_128:.2f} at D=128, fp8 or not"
    measured = 4 * 2 * 32 * 8192**2 * 64 / 1.237e-3 / 1e15
    share = f"bf16 reached {measured:.2f} PFLOP/s" if measured < at_64 else "measured above it"
    return text, "", _yes(measured < at_64 < gpu.spec_flops("bf16") / 1e15), f"{share}: fp8 buys nothing there"


def legacy_instructions() -> Answer:
    gpu = load_profile("b200")
    result = simulate("fa2", AttentionProblem(2, 16, 16, 8192, 8192, 128), gpu)
    share = result.tflops * 1e12 / gpu.spec_flops("bf16")
    return f"{share:.0%} of peak", "", _yes(abs(share - 0.16) < 0.04), "mma.sync: not a question of tuning"


def determinism() -> Answer:
    gpu = load_profile("h200_sxm")

    def kernels(algorithm: str, deterministic: bool) -> list[tuple[str, int]]:
        problem = AttentionProblem(1, 4, 4, 2048, 2048, 128, pass_="bwd", deterministic=deterministic)
        return [(k.name, k.ctas) for k in build_program(algorithm, problem, gpu).kernels]

    honoured = [name for name in ("fa2", "fa3") if kernels(name, True) != kernels(name, False)]
    plain = AttentionProblem(1, 4, 4, 2048, 2048, 128, pass_="bwd", deterministic=True)
    atomics = [
        op for k in build_program("fa1", plain, gpu).kernels for _, _, op in k.walk()
        if isinstance(op, Store) and op.accumulate
    ]  # fmt: skip
    text = f"honoured by {' and '.join(honoured)}; fa1 runs {len(atomics)} atomic stores"
    good = honoured == ["fa2", "fa3"] and not atomics
    return text, "", _yes(good), "never dropped: other kernels run, or one that adds in a fixed order"


def seventy_times_off() -> Answer:
    gpu: Profile = load_profile("h100_sxm")
    bytes_read = 24e-3 * gpu.hbm_bandwidth_bytes_per_s
    text = f"24 ms of HBM reads are {bytes_read / 1e9:.0f} GB"
    note = f"the card holds {gpu.hbm_bytes / 1e9:.0f} GB: no cache is that long; a software fault"
    return text, "", _yes(bytes_read >= 0.9 * gpu.hbm_bytes), note


def fp8_alone() -> Answer:
    gpu = load_profile("h100_sxm")
    problem = AttentionProblem(32, 32, 8, 1024, 1024, 128, causal=True)
    gain = simulate("fa3", problem, gpu).time_us / simulate("fa3", problem.with_(dtype="fp8"), gpu).time_us
    return f"attention alone gains x{gain:.2f}", "", _yes(gain > 1.0), "the thread compares a layer with a bare kernel"


def _not_asked(why: str) -> Callable[[], Answer]:
    return lambda: ("—", "", "not asked of the model", why)


def refuses(algorithm: str, problem: AttentionProblem, gpu: Profile) -> bool:
    """Whether ``algorithm`` has no kernel for ``problem`` on ``gpu``."""
    try:
        build_program(algorithm, problem, gpu)
    except (UnsupportedError, InputError):
        return True
    return False


#: (case, what is asked, what its thread says, answer).
MORE = (
    (1, "128/16 heads: padded tensor work on the H20, memory on the H100?", "16x; tensor; memory", padded_rows),
    (4, "B=32, 32/8, 4k: over-split", "198 us, tuned 135 us", over_splitting),
    (11, "FlashMLA with lengths that vary", "7 to 10 % slower", drawn_lengths),
    (12, "FlashMLA on the H20: is 139 GB/s a fault?", "no: compute-bound", low_bandwidth_is_right),
    (15, "sparse MLA without splits: why equal for 1 and 6 queries?", "26.6 us each", unsplit_mla),
    (18, "FA3 D=64 on an H100 PCIe: at which clock?", "243 to 323 TFLOP/s", clock_of_the_pcie_card),
    (19, "FA3 8k D=128: why 465 here and 639 there?", "a machine difference", clock_of_the_slow_box),
    (23, "fp32 dQ that the backward adds at D=256, S=16k", "S^2 D 4 / tile N", dq_reduction),
    (25, "B200: what caps D=64, whatever the dtype?", "the exponential unit, 1.12 PFLOP/s", exp_ceiling),
    (27, "FA2 on a B200: 352 TFLOP/s at 8k", "16 % of 2250", legacy_instructions),
    (40, "cuDNN wrong with fewer than 8 KV heads", "accuracy 46 % for 82 %", _not_asked("a wrong result")),
    (41, "a deterministic flag that is dropped", "silently", determinism),
    (42, "FA3 decode 24 ms on an H100: bandwidth?", "closed, 70 times off", seventy_times_off),
    (48, "GEMM faster with truncated mantissas", "7 %", _not_asked("power by bit pattern is not modelled")),
    (49, "FP8 slower than bf16? B=32, S=1024, 32/8", "a layer was timed", fp8_alone),
)
