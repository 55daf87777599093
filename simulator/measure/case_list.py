"""The case list of the H200 campaign: shape families, each varying one thing, and the shapes of real models.

Families are the unit of the calibrate/judge split. ``python -m simulator.measure.case_list OUT.csv`` writes the list;
with ``--random N SEED`` so many random cases instead, with ``--builds`` one for each compiled kernel, with
``--unaligned`` unfused attention's unaligned rows, with ``--check`` the small ones that compare numbers.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from simulator.measure.case_families import case_name, launch_series, length_sweeps, long_rows, models, shape_sweeps
from simulator.measure.case_families_builds import builds
from simulator.measure.case_families_more import backward, decode, first_flash, other_forward, unfused
from simulator.measure.case_families_random import random_cases
from simulator.measure.case_families_unaligned import unaligned
from simulator.measure.cases import Case, write_cases


def all_cases() -> list[Case]:
    """Every case once, ids unique."""
    builders = (
        launch_series,
        length_sweeps,
        long_rows,
        shape_sweeps,
        models,
        unfused,
        first_flash,
        decode,
        backward,
        other_forward,
    )
    cases = [case for builder in builders for case in builder()]
    assert len({case.case_id for case in cases}) == len(cases), "two cases with one id"
    return cases


def check_cases() -> list[Case]:
    """Small cases that touch every kernel and option: for comparing each with float32 attention."""
    base = Case("", "check", "fa2", "torch_flash", batch=2, heads=4, kv_heads=4, seqlen_q=300, seqlen_k=300)
    variants: list[Case] = []
    for algorithm, implementation in (
        ("standard", "torch_eager"),
        ("fa1", "flash_attn_1_paper"),
        ("fa2", "torch_flash"),
        ("fa3", "flash_attn_3"),
        ("fa3", "cudnn_sm90"),
    ):
        for head_dim in (64, 128):
            for causal in (False, True):
                variants.append(
                    replace(base, algorithm=algorithm, implementation=implementation, head_dim=head_dim, causal=causal)
                )
    for algorithm, implementation in (
        ("standard", "torch_eager"),
        ("fa2", "torch_flash"),
        ("fa3", "flash_attn_3"),
        ("fa3", "cudnn_sm90"),
    ):
        variants.append(replace(base, algorithm=algorithm, implementation=implementation, causal=True, kv_heads=2))
    variants.append(replace(base, num_splits=1, causal=True))
    variants.append(replace(base, window=(64, 0), causal=True))
    variants.append(replace(base, algorithm="fa3", implementation="flash_attn_3", window=(64, 0), causal=True))
    variants.append(replace(base, algorithm="fa3", implementation="flash_attn_3", window=(50, 50)))
    variants.append(replace(base, algorithm="fa3", implementation="flash_attn_3", dtype="fp8"))
    variants.append(replace(base, head_dim=256, algorithm="fa3", implementation="flash_attn_3", causal=True))
    for implementation in ("torch_flash_splitkv", "flash_attn_3_kvcache"):
        decode_base = replace(
            base, algorithm="flash_decoding", implementation=implementation, seqlen_q=1, seqlen_k=2000, kv_heads=2
        )
        variants.append(decode_base)
        variants.append(replace(decode_base, seqlen_q=4, causal=True))
        if implementation == "flash_attn_3_kvcache":
            variants += [
                replace(decode_base, num_splits=7),
                replace(decode_base, kv_capacity=4096),
                replace(decode_base, page_size=16, kv_capacity=2048),
                replace(decode_base, dtype="fp8"),
            ]
    for algorithm, implementation in (
        ("standard", "torch_eager"),
        ("fa2", "torch_flash"),
        ("fa3", "cudnn_sm90"),
        ("fa3", "flash_attn_4_sm90"),
    ):
        for causal in (False, True):
            variants.append(
                replace(base, algorithm=algorithm, implementation=implementation, pass_="bwd", causal=causal)
            )
    variants.append(replace(base, pass_="bwd", deterministic=True, causal=True))
    variants.append(replace(base, algorithm="fa3", implementation="flash_attn_4_sm90", pass_="bwd", kv_heads=2))
    return [replace(case, case_id=f"{case.implementation}-{case_name(case)}-{case.pass_}") for case in variants]


def main(path: str, *options: str) -> None:
    """Write the list that ``options`` ask for to ``path``."""
    if options[:1] == ("--random",):
        write_cases(path, random_cases(int(options[1]), int(options[2])))
    elif options == ("--builds",):
        write_cases(path, builds())
    elif options == ("--unaligned",):
        write_cases(path, unaligned())
    else:
        write_cases(path, check_cases() if "--check" in options else all_cases())


if __name__ == "__main__":
    main(*sys.argv[1:])
