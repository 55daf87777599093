"""What the H200 campaign shows: each finding is a table computed from the committed CSV files.

``python -m simulator.measure.findings NAME`` prints one; ``--write`` rewrites FINDINGS.md beside the data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from simulator.measure import finding_tables as tables


@dataclass(frozen=True)
class Finding:
    """A name, one paragraph of what to see, and the table that shows it."""

    name: str
    title: str
    text: str
    table: Callable[[], pd.DataFrame]


FINDINGS = (
    Finding(
        "noise",
        "How far two runs differ",
        "Runs 1 and 2 idle 0.1 s before each case. The busy runs did not: a case then inherits the clock that "
        "the power controller left behind, and the same kernel takes up to a third longer. Times the counted "
        "clock, i.e. cycles, repeat better than times. The largest differences left are rows with "
        "timing=eager (the host) and one bimodal row (fa2_odd-b212-h16-q77-d128).",
        tables.table_noise,
    ),
    Finding(
        "known_traffic",
        "SM-to-L2 bytes, checked on kernels whose traffic is known",
        "SM-sourced sectors x 32 B give exactly S for the QK^T GEMM and for softmax, and O plus LSE for FA3 "
        "at head dim 128. FA3 at head dim 64 writes 15 to 19 % more than that (it spills a little, see "
        "spills).",
        tables.table_known_traffic,
    ),
    Finding(
        "roofline",
        "Where time departs from the roofline",
        "Time over max(tensor time, HBM time): tensor at 4096 bf16 FLOP a clock and SM at the clock counted "
        "in the run, HBM at the best streaming read, inputs and output once. Near 1 only for long FA3 and for "
        "decode that fills the GPU. FA2 sits at 2.8 (mma.sync, and softmax not overlapped), unfused attention "
        "an order of magnitude off.",
        tables.table_roofline,
    ),
    Finding(
        "clock",
        "What the SM clock does in single launches",
        "Counted by the SMs around each launch, GPU cool. Tensor work lowers the clock at once (FA3 at head "
        "dim 128: about 1.70 GHz, FA2: 1.80), nearly idle launches run at 1.98, memory-bound ones at 1.74 to "
        "1.95. NVML says 1980 throughout.",
        tables.table_clock,
    ),
    Finding(
        "clock_under_load",
        "What the SM clock does under lasting load",
        "A bf16 GEMM starts at 1.61 GHz and falls to 1.35 within a second, at the 700 W cap. Memory reads and "
        "exponentials do not lower the clock by themselves.",
        tables.table_clock_under_load,
    ),
    Finding(
        "capacity",
        "When HBM reads exceed the inputs",
        "From a cold L2 most kernels read their inputs once. Once the K and V of the heads that are live "
        "together exceed L2, FA2's grid order re-reads them: 378 GB for 1.6 GB of inputs at 128k causal GQA; "
        "FA3's order needs 8 GB.",
        tables.table_capacity,
    ),
    Finding(
        "survivors",
        "What reading 512 MB does not evict",
        "A method artefact that every small row carries: up to 11.5 MB of a case's own K and V (FA2; 8 MB "
        "FA3) are still in L2 after the flush, the same bytes in both runs. Time and counters share the "
        "method, so they agree with each other; HBM bytes of rows below about 150 MB can be short by that "
        "much. Compare bytes on rows above it, or add the constant.",
        tables.table_survivors,
    ),
    Finding(
        "spills",
        "FA2 writes far more to L2 than O",
        "The surplus grows with the number of keys and is close to the local-memory stores at head dim 64 and "
        "128: spilled registers, written once per key block. They hit L2: HBM writes stay near O. Head dims "
        "96 and 256 do not spill.",
        tables.table_spills,
    ),
    Finding(
        "waves",
        "CTAs around full waves (8192 keys; FA1: 1024), in us",
        "Columns are heads = CTAs, 132 SMs. FA3 takes one CTA an SM: 133 heads cost 57 to 84 % more than 132. "
        "FA2 (varlen entry, 64 query rows a CTA) fits two: the 133rd CTA shares an SM and already costs 45 %, "
        "the 265th starts another round. FA1 steps at 397 with head dim 64 (three CTAs an SM), between 264 "
        "and 396 with head dim 128 (two).",
        tables.table_waves,
    ),
    Finding(
        "first_flash",
        "FA1's schedule beside FA2 and unfused attention",
        "On the same problems. FA1's HBM bytes grow with N squared over the block size, as the paper says: "
        "below unfused attention's at head dim 64, about equal or above at 128. Its time beats unfused "
        "attention at head dim 64 up to 2048 tokens, and with a mask up to 8192; at 128 with a mask at 512 to "
        "2048 only.",
        tables.table_first_flash,
    ),
    Finding(
        "softmax",
        "Unfused attention is three different softmax kernels",
        "Per kernel at head dim 128, 16k tokens. The row length picks the kernel; between 4096 and 8192 keys "
        "it reaches only 1.1 to 1.3 TB/s. The mask addition costs two more passes at the speed of a generic "
        "elementwise kernel.",
        tables.table_softmax,
    ),
    Finding(
        "splits",
        "FA3 decode by number of splits, in us",
        "At batch 1 more splits help until the SMs are full (16 x 8 heads = 128 CTAs), then the combine "
        "costs; at batch 32 every split loses. auto is the library's heuristic.",
        tables.table_splits,
    ),
    Finding(
        "pages",
        "FA3 decode on pages",
        "Pages down to one token cost under 7 % here: decode gathers rows either way.",
        tables.table_pages,
    ),
    Finding(
        "pipes",
        "Instruction pipes",
        "Exponentials (16 a clock and SM) and FMA overlap: one ex2 hides four FMAs; from six on the FMA side "
        "binds. max runs at half the FMA rate. A softmax-like mix (max, FMA, ex2, add, half a convert) still "
        "reaches 15 of 16. mma.sync reaches 62 % of wgmma, which reaches 4084 of 4096 from shared memory with "
        "one warpgroup.",
        tables.table_pipes,
    ),
    Finding(
        "hbm",
        "HBM by direction, size and walking order",
        "From 1 GiB on reads reach 4.5 TB/s, writes 4.3, copies 4.3 when the grid walks the buffer together. "
        "A copy in which each CTA walks its own distant chunk falls to 2.9 TB/s at 8 GiB: order, not size, is "
        "what makes large copies slow.",
        tables.table_hbm,
    ),
    Finding(
        "l2",
        "L2 bandwidth, knee and latency",
        "7.6 to 8.9 TB/s from 4 to 54 MB, down to HBM speed at 75 MB. Latency rises from 290 to 350 cycles as "
        "the footprint grows to 42 MB, 667 to 677 cycles in HBM.",
        tables.table_l2,
    ),
    Finding(
        "streams",
        "What a few CTAs can stream from HBM, GB/s",
        "Little's law per CTA up to about 200 GB/s at 128 KiB in flight; eight CTAs with 128 KiB already "
        "share a limit (1.2 TB/s), and 64 saturate the chip.",
        tables.table_streams,
    ),
    Finding(
        "launch",
        "Graph time minus the kernels' own span, us",
        "Time between the events minus first kernel's start to last kernel's end, rows below 60 us. About 2.2 "
        "us for one kernel; with more kernels a graph's gaps are shorter than the stream's, so the difference "
        "shrinks and turns negative.",
        tables.table_launch,
    ),
    Finding(
        "backward",
        "Backward: HBM bytes over the compulsory sum",
        "About 2.1 times Q, K, V, O, dO, dQ, dK, dV once (fp32 dQ accumulation, its fill and conversion), 3.3 "
        "to 3.9 times under GQA (expanded dK and dV and their reduction).",
        tables.table_backward,
    ),
)


def page() -> str:
    """FINDINGS.md: every finding with its command and its table as the code computes it now."""
    parts = [
        "# What the H200 campaign shows",
        "",
        "Written by `python -m simulator.measure.findings --write` from the CSV files in this "
        "folder; README.md says how "
        "they were taken. Each section's command prints its table.",
    ]
    for finding in FINDINGS:
        command = f"python -m simulator.measure.findings {finding.name}"
        table = finding.table().to_string(index=False)
        parts += ["", f"## {finding.title}", "", finding.text, "", f"`{command}`", "", "```", table, "```"]
    return "\n".join(line.rstrip() for line in "\n".join(parts).split("\n")) + "\n"


def main(arguments: list[str]) -> int:
    """Print one table, or rewrite the page; an unknown name lists the known ones. Returns the exit code."""
    known = {finding.name: finding for finding in FINDINGS}
    if arguments == ["--write"]:
        (tables.DATA / "FINDINGS.md").write_text(page(), encoding="utf-8")
    elif len(arguments) == 1 and arguments[0] in known:
        print(known[arguments[0]].table().to_string(index=False))
    else:
        print(f"usage: findings --write | {' | '.join(known)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
