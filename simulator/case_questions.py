"""The public cases that ask something else than a time: each question, and how the model answers it."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass

from algorithms import build_program
from simulator.accesses import sm_traffic
from simulator.case_questions_more import MORE, refuses
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile, load_profile
from simulator.published import published_directory
from simulator.simulation import simulate

#: Predicted, ratio, explained, note: the cells of a table row that a question fills.
Answer = tuple[str, str, str, str]


@dataclass(frozen=True)
class Question:
    """What a case asks, what its thread says, and ``answer()``."""

    case: int
    asked: str
    measured: str
    answer: Callable[[], Answer]


def _verdict(right: bool) -> str:
    return "yes" if right else "no"


def _splits(batch: int) -> int:
    problem = AttentionProblem(batch, 40, 8, 1, 512, 128, dtype="fp16", kv_capacity=1024)
    program = build_program("flash_decoding", problem, load_profile("h100_sxm"), "torch_flash_splitkv")
    combine = next((k for k in program.kernels if "combine" in k.name), None)
    main = next(k for k in program.kernels if k is not combine)
    return main.ctas // (batch * 8) if combine is not None else 1


def splits_by_batch() -> Answer:
    found = {batch: _splits(batch) for batch in (24, 25, 33, 34)}
    text = ", ".join(f"{splits} at B={batch}" for batch, splits in found.items())
    return text, "", _verdict(found == {24: 4, 25: 1, 33: 1, 34: 1}), "splits follow the cache's capacity, not its use"


def wave_boundary() -> Answer:
    times = {b: _decode_time(b) for b in (33, 34)}
    step = times[34] / times[33]
    return f"x{step:.2f} from B=33 to B=34", "", _verdict(step > 1.05), "264 slots: a second wave begins at 272 CTAs"


def _decode_time(batch: int) -> float:
    problem = AttentionProblem(batch, 40, 8, 1, 512, 128, dtype="fp16", kv_capacity=1024)
    return simulate("flash_decoding", problem, load_profile("h100_sxm"), implementation="torch_flash_splitkv").time_us


def bandwidth_buys_nothing() -> Answer:
    problem = AttentionProblem(1, 8, 8, 32768, 32768, 64)
    h100, h200 = (simulate("fa3", problem, load_profile(g)).time_us for g in ("h100_sxm", "h200_sxm"))
    ratio = h200 / h100
    return f"H200/H100 {ratio:.2f}", "", _verdict(abs(ratio - 1) < 0.06), "HBM is idle: bandwidth buys nothing"


def _measured_host_us() -> float:
    """What one call of FA3's Python entry took on our idle H200, whose kernel needs a tenth of it."""
    path = published_directory().parent / "measurements" / "h200_sxm" / "timed_run1.csv"
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return float(next(r["measured_time_us"] for r in rows if r["case_id"] == "fa3_eager-b1-h16-q512-d128-eager"))


def short_varlen() -> Answer:
    def time(n: int) -> float:
        problem = AttentionProblem(1, 12, 1, n, n, 128, seqlens_q=(n,), seqlens_k=(n,), causal=True)
        return simulate("fa3", problem, load_profile("h100_sxm")).time_us

    few, many, host = time(128), time(4096), _measured_host_us()
    text = f"kernels of {few:.0f} us at 128 and {many:.0f} us at 4096 tokens behind a host of {host:.0f} us"
    note = "the host's time is our H200's row fa3_eager: FA3's Python entry takes longer than any of these kernels"
    return text, "", _verdict(many < host), note


def masked_flash() -> Answer:
    problem = AttentionProblem(heads=8, seqlen_q=512, head_dim=64, mask="bool")
    try:
        build_program("fa2", problem, load_profile("h100_sxm"))
    except UnsupportedError as error:
        return "refused", "", _verdict("SDPA" in str(error)), "the message names the silent fall-through"
    return "ran", "", "no", ""


def _lesser_ampere() -> Profile:
    return load_profile("a100_sxm4_80gb", {"smem_bytes_per_cta_max": "99KiB", "smem_bytes_per_sm": "100KiB"})


def fa1_backward_smem() -> Answer:
    problem = AttentionProblem(heads=8, seqlen_q=1024, head_dim=128, dtype="fp16", pass_="bwd")

    large, small = (not refuses("fa1", problem, gpu) for gpu in (load_profile("a100_sxm4_80gb"), _lesser_ampere()))
    text = f"163 KiB: {'runs' if large else 'refused'}; 99 KiB: {'runs' if small else 'refused'}"
    return text, "", _verdict(large and not small), "SMEM of the backward tile against the SM's"


def io_counts() -> Answer:
    problem = AttentionProblem(heads=1, seqlen_q=4096, head_dim=64, dtype="fp16")
    gpu = load_profile("a100_sxm4_80gb")
    size = 4096 * 64 * 2

    def moved(algorithm: str, implementation: str, names: tuple[str, ...]) -> float:
        kernel = build_program(algorithm, problem, gpu, implementation).kernels[-1]
        return sum(sum(sm_traffic(kernel).get(name, (0, 0))) for name in names) / size

    fa1 = moved("fa1", "flash_attn_1_paper", ("O", "O_tmp"))
    fa2 = moved("fa2", "torch_flash", ("O",))
    text = f"O moves {fa1:.0f}x its size in FA1, {fa2:.0f}x in FA2"
    return text, "", _verdict(fa2 == 1 and fa1 > 10), "K and V are re-read from L2 instead: see the L2 columns"


def causal_flops() -> Answer:
    problem = AttentionProblem(heads=1, seqlen_q=65536, head_dim=128)
    share = problem.with_(causal=True).flops() / problem.flops()
    text = f"causal FLOPs are {share:.2f} of dense ones"
    return text, "", _verdict(abs(share - 0.5) < 0.001), "322 TFLOP/s were 161"


def impossible_rate() -> Answer:
    problem = AttentionProblem(1, 64, 64, 10000, 10000, 128, dtype="fp16")
    rate = problem.flops() / 3422e-6 / 1e12
    text = f"the dense time means {rate:.0f} TFLOP/s"
    return text, "", _verdict(rate > 165), "above the part's 165: a broken benchmark"


def math_workspace() -> Answer:
    problem = AttentionProblem(1, 32, 8, 8192, 8192, 512)
    peak = simulate("standard", problem, load_profile("a100_sxm4_80gb")).peak_memory_bytes
    scores = 32 * 8192 * 8192 * 2
    note = "two S-sized tensors in 16 bits; SDPA's math holds them in 32"
    return f"{peak / 1e9:.1f} GB held at 8k", "", _verdict(peak > 2 * scores), note


_FIRST = (
    Question(
        6,
        "FA2 decode splits, 40/8 heads, cache of 1024, 132 SMs",
        "4 at B=24, 1 from B=25 (derived)",
        splits_by_batch,
    ),
    Question(6, "the same: second wave", "between B=33 and B=34 (derived)", wave_boundary),
    Question(17, "FA3 D=64 S=32k: does the H200's memory help?", "ratio 1.06", bandwidth_buys_nothing),
    Question(33, "FA3 varlen 12/1 heads D=128 B=1, 128 to 4096 tokens", "constant time", short_varlen),
    Question(35, "RTX 4090: varlen 300 times slower than dense?", "3.42 ms dense", impossible_rate),
    Question(38, "silent math fallback at D=512 with GQA", "out of memory at 8k", math_workspace),
    Question(39, "flash attention with a mask", "falls through silently", masked_flash),
    Question(44, "FA1 backward D=128: 163 KB of SMEM against 99 KB", "runs; does not", fa1_backward_smem),
    Question(45, "does O travel again for every key block?", "FA1 yes, FA2 no", io_counts),
    Question(46, "322 TFLOP/s on a part of 312", "causal halving left out", causal_flops),
)
QUESTIONS = (*_FIRST, *(Question(*entry) for entry in MORE))

NOTES = {
    1: "the H20 is bound by padded tensor work, the H100 by memory. The H100's variant is not stated: 1.85 TB/s is 55 %"
    " of the SXM's bandwidth but 91 % of the PCIe part's, which the model explains without a loss by pages of 8.",
    7: "FA4's paged kernels are not modelled. On our H200 FA3's gathers lose 6 % from pages of 256 to pages of 1: DRAM "
    "rows found closed (micro_pages.csv), which is modelled; nothing there comes near this thread's factor of 4.6.",
    11: "FlashMLA's rows are compared with FA3's MLA kernel, which streams the same bytes.",
    12: "as 11, on the H20: tensor-bound, so that the low bandwidth is right.",
    25: "unfused attention of flash-attention's benchmark at 2048 keys is a fourth too fast: cuBLAS's kernels on the "
    "B200 are assumed ones.",
    27: "FA2's ramp is explained from 1k to 8k; at 16k the thread's rate falls by 9 %, for which no cause is known.",
    31: "unfused attention at 512 to 2048 keys is a fifth too fast, at 4k and 8k within 6 %: its short rows "
    "hold something that our campaign's calls of the same kernels do not.",
    42: "shape not stated: no prediction; 70 times off the other GPU is a fault, as the thread concluded.",
}
