"""Sequences of different lengths: exact numbers, bytes of the rows that exist, each library's scheduling."""

import numpy as np
import pytest

from algorithms import build_program
from algorithms.varlen import padded, padding_share
from simulator import simulate
from simulator.accesses import sm_traffic
from simulator.cli import main
from simulator.comparison import compare
from simulator.errors import InputError, UnsupportedError
from simulator.options import parse_lengths
from simulator.predict import predict_row
from simulator.problem import AttentionProblem
from simulator.profile import load_profile
from simulator.reference import attention, random_inputs, run_attention

GPU = load_profile("h200_sxm")
SELF = (300, 17, 129, 256)
CASES = [
    {},
    {"causal": True},
    {"kv_heads": 1, "causal": True},
    {"window": (40, 0), "causal": True},
    {"window": (20, 60)},
    {"head_dim": 128, "dtype": "fp16", "kv_heads": 1},
    {"seqlens_k": (40, 200, 129, 333), "seqlen_k": 333, "causal": True},
    {"seqlens_q": None, "seqlen_q": 70, "seqlens_k": (80, 200, 70, 300), "seqlen_k": 300, "causal": True},
    {"softcap": 2.0},
]


def problem_of(**changes):
    sizes = {"batch": 4, "heads": 2, "seqlen_q": 300, "head_dim": 64, "seqlens_q": SELF, "seqlens_k": SELF}
    return AttentionProblem(**(sizes | changes))


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_numbers_equal_float64(algorithm, changes):
    problem = problem_of(**changes)
    inputs = random_inputs(problem, seed=4)
    got = run_attention(build_program(algorithm, problem, GPU), inputs)
    want = attention(problem, inputs["Q"], inputs["K"], inputs["V"])
    assert np.abs(got["O"] - want["O"]).max() < 0.01 * np.abs(want["O"]).max()
    seen = np.isfinite(want["LSE"])
    assert np.array_equal(seen, np.isfinite(got["LSE"])) and np.abs(got["LSE"][seen] - want["LSE"][seen]).max() < 2e-3
    # each sequence alone gives the same
    queries, keys = problem.sequences()[1]
    alone = problem.with_(batch=1, seqlen_q=queries, seqlen_k=keys, seqlens_q=None, seqlens_k=None)
    kv = slice(problem.kv_heads, 2 * problem.kv_heads)
    o = attention(alone, inputs["Q"][2:4, :queries], inputs["K"][kv, :keys], inputs["V"][kv, :keys])["O"]
    assert np.abs(o - want["O"][2:4, :queries]).max() < 1e-12


def test_dropout_counts_from_the_beginning_of_each_sequence():
    problem = problem_of(dropout=0.3)
    inputs = random_inputs(problem, seed=4)
    got = run_attention(build_program("fa2", problem, GPU), inputs)["O"]
    want = attention(problem, inputs["Q"], inputs["K"], inputs["V"])["O"]
    assert np.abs(got - want).max() < 0.01 * np.abs(want).max()


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_bytes_are_those_of_the_rows_that_exist(algorithm):
    problem = problem_of()
    program = build_program(algorithm, problem, GPU)
    kernel = program.kernels[-1]
    tile_m = program.attributes["tile"][0]
    traffic = sm_traffic(kernel)
    rows, heads, row_bytes = sum(SELF), 2, 128
    assert traffic["Q"] == (heads * rows * row_bytes, 0) and traffic["O"] == (0, heads * rows * row_bytes)
    assert traffic["LSE"] == (0, heads * rows * 4)
    assert traffic["K"][0] == heads * row_bytes * sum(-(-n // tile_m) * n for n in SELF)
    assert sum(program.inputs[n].bytes for n in "QKV") == 3 * heads * rows * row_bytes


def test_flops_are_those_of_the_sequences():
    problem = problem_of(causal=True)
    assert problem.flops() == 4 * 2 * 64 * sum(n * (n + 1) // 2 for n in SELF)
    assert 0.5 < padding_share(problem) < 0.7 and padded(problem).flops() == 4 * 2 * 64 * 4 * 300 * 301 // 2


def test_fa2_launches_a_cta_for_every_block_of_the_longest_and_fa3_only_tiles_that_exist():
    problem = problem_of()
    fa2, fa3 = (build_program(a, problem, GPU).kernels[-1] for a in ("fa2", "fa3"))
    assert fa2.ctas == 2 * 4 * 3 and int(fa2.coords["n_live"].sum()) == 2 * (3 + 1 + 2 + 2)
    assert fa3.ctas == 2 * sum(-(-n // 192) for n in SELF) and fa3.schedule == "dynamic"
    assert build_program("fa3", problem, GPU).kernels[0].name == "prepare_varlen_num_blocks"


def test_fa3_takes_the_sequences_with_most_keys_first():
    program = build_program("fa3", problem_of(), GPU)
    batch = program.kernels[-1].coords["q_head"] // 2
    # 300 and 256 keys are two blocks of 192; of one block each, the first comes first
    assert list(dict.fromkeys(batch.tolist())) == [0, 3, 1, 2]
    windowed = build_program("fa3", problem_of(window=(20, 0)), GPU).kernels[-1].coords["q_head"] // 2
    assert list(dict.fromkeys(windowed.tolist())) == [0, 1, 2, 3]


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_varlen_is_faster_than_padding_and_equal_lengths_cost_the_same(algorithm):
    lengths = (256, 1024, 8192, 512)
    problem = AttentionProblem(
        batch=4, heads=16, seqlen_q=8192, head_dim=128, causal=True, seqlens_q=lengths, seqlens_k=lengths
    )
    ragged, whole = (simulate(algorithm, p, GPU) for p in (problem, padded(problem)))
    # the longest sequence does 98 % of the work: the others, padded, cost three times as much again
    assert 0.2 < ragged.time_us / whole.time_us < 0.35
    assert ragged.flops < 0.3 * whole.flops
    equal = problem.with_(seqlen_q=2048, seqlen_k=2048, seqlens_q=(2048,) * 4, seqlens_k=(2048,) * 4)
    ragged, whole = (simulate(algorithm, p, GPU).time_us for p in (equal, padded(equal)))
    # FA2's kernel for lengths by sequence checks bounds: more masked blocks and more code (H200: 2049 tokens cost 20 %
    # more than 2048)
    assert 0.95 * whole < ragged < {"fa2": 1.25, "fa3": 1.12}[algorithm] * whole


def test_many_short_sequences():
    lengths = (32,) * 500 + (64,) * 499 + (2048,)
    problem = AttentionProblem(
        batch=1000, heads=4, seqlen_q=2048, head_dim=64, causal=True, seqlens_q=lengths, seqlens_k=lengths
    )
    fa2, fa3 = (simulate(a, problem, GPU) for a in ("fa2", "fa3"))
    # FA2's grid has 16 row blocks for each of them, of which one lives
    assert fa2.kernels[-1].ctas == 64_000 and fa3.kernels[-1].ctas == 4 * (999 + 11)
    assert fa2.time_us > 1.5 * fa3.time_us
    assert simulate("fa3", padded(problem), GPU).time_us > 10 * fa3.time_us


def test_the_column_of_predict():
    row = {"algorithm": "fa3", "heads": "16", "head_dim": "128", "seqlens": "256;1024;8192", "gpu": "h200_sxm"}
    output = predict_row(row)
    assert not output["error"] and output["flops"] == 4 * 16 * 128 * (256**2 + 1024**2 + 8192**2)


@pytest.mark.parametrize(
    "algorithm, changes, says",
    [
        ("standard", {}, "varlen.*padding"),
        ("fa1", {"pass_": "bwd", "kv_heads": 1}, "1 KV heads"),
        ("fa1", {"kv_heads": 1}, "1 KV heads"),
    ],
)
def test_what_has_no_lengths_by_sequence_says_so(algorithm, changes, says):
    with pytest.raises(UnsupportedError, match=says):
        build_program(algorithm, problem_of(**changes), GPU)


FA1_CASES = [
    {},
    {"causal": True},
    {"causal": True, "head_dim": 128, "dtype": "fp16"},
    {"dropout": 0.3},
    {"seqlens_k": (40, 200, 129, 333), "seqlen_k": 333, "causal": True},
]


@pytest.mark.parametrize("sms", [132, 3])
@pytest.mark.parametrize("changes", FA1_CASES, ids=str)
def test_first_flash_attention_takes_sequences_as_they_are(changes, sms):
    problem, gpu = problem_of(**changes), load_profile("h200_sxm", {"num_sms": sms})
    inputs = random_inputs(problem, seed=4)
    program = build_program("fa1", problem, gpu)
    got = run_attention(program, inputs)
    want = attention(problem, inputs["Q"], inputs["K"], inputs["V"])
    assert np.abs(got["O"] - want["O"]).max() < 0.01 * np.abs(want["O"]).max()
    seen = np.isfinite(want["LSE"])
    assert np.array_equal(seen, np.isfinite(got["LSE"])) and np.abs(got["LSE"][seen] - want["LSE"][seen]).max() < 2e-3
    # K once a CTA (a slice of a head's rows), Q once a key block, rows that exist alone
    traffic, slices = sm_traffic(program.kernels[-1]), program.attributes["row_slices"]
    tile_n, row_bytes = program.attributes["tile"][1], 2 * problem.heads * problem.head_dim
    if not problem.causal:
        assert traffic["Q"][0] == row_bytes * sum(q * -(-k // tile_n) for q, k in problem.sequences())
        assert traffic["O"] == (0, row_bytes * sum(q for q, _ in problem.sequences()))
        assert traffic["K"][0] <= slices * row_bytes * sum(k for _, k in problem.sequences())


@pytest.mark.parametrize("deterministic", [False, True], ids=["key blocks in parallel", "in sequence"])
def test_first_flash_attentions_backward_moves_rows_that_exist(deterministic):
    lengths = (900, 20, 300)
    p = problem_of(
        batch=3, heads=4, seqlen_q=900, seqlens_q=lengths, seqlens_k=lengths, pass_="bwd", deterministic=deterministic
    )
    program = build_program("fa1", p, GPU)
    assert program.attributes["key_blocks_in_parallel"] != deterministic
    main_kernel = next(kernel for kernel in program.kernels if kernel.name == "fmha_bwd")
    traffic, keys = sm_traffic(main_kernel), program.attributes["backward_tile"][1]
    row_bytes = 2 * p.heads * p.head_dim
    for name in ("dK", "dV"):
        assert traffic[name] == (0, row_bytes * sum(lengths))
    for name in ("Q", "dO"):
        assert traffic[name][0] == row_bytes * sum(n * -(-n // keys) for n in lengths)
    copies = [sm_traffic(kernel).get("dQ_tmp") for kernel in program.kernels if kernel is not main_kernel]
    assert copies == [] if deterministic else (0, 2 * row_bytes * sum(lengths)) in copies
    assert simulate("fa1", p, GPU).time_us < simulate("fa1", padded(p), GPU).time_us


def test_first_flash_attention_gives_free_slots_to_the_next_cta():
    lengths = (2048, *(256,) * 31)
    problem = AttentionProblem(
        batch=32, heads=16, seqlen_q=2048, head_dim=64, dtype="fp16", seqlens_q=lengths, seqlens_k=lengths
    )
    program = build_program("fa1", problem, GPU)
    coords, slots = program.kernels[-1].coords, 2 * GPU.num_sms
    runs = [coords["q_head"][slot::slots] for slot in range(slots)]
    heads_of_slot = [list(dict.fromkeys(run[run >= 0].tolist())) for run in runs]
    # nothing follows a head of the long sequence (0 to 15): the short ones go to slots that are free earlier
    assert all(not set(heads[:-1]) & set(range(16)) for heads in heads_of_slot)
    assert max(len(heads) for heads in heads_of_slot) == 2
    ragged, whole = (simulate("fa1", p, GPU).time_us for p in (problem, padded(problem)))
    assert ragged < 0.5 * whole


def test_compare_shows_the_padded_alternative_beside_it(capsys):
    arguments = "--seqlens 64,128,512 --heads 2 --head-dim 64 --gpu h200_sxm -j 1"
    assert main(["compare", *arguments.split(), "--algorithm", "standard,fa2,fa3,flash_decoding"]) == 0
    out = capsys.readouterr().out
    words = " ".join(out.split())  # wherever a narrow terminal breaks lines
    assert "64/128/512 queries" in words and "of the score elements are padding" in words
    names = [line.split("  ")[0].strip() for line in out.splitlines()]
    for name in ("standard padded", "fa2", "fa2 padded", "fa3", "fa3 padded", "flash_decoding*"):
        assert any(n.startswith(name) for n in names), (name, out)


def test_speed_ups_are_over_padded_standard():
    problem = problem_of(causal=True)
    entries = {entry.label: entry for entry in compare(problem, [GPU], ["standard", "fa2", "fa1"]).entries}
    assert set(entries) == {"standard padded", "fa2", "fa2 padded", "fa1", "fa1 padded"}
    base = entries["standard padded"].result.time_us
    assert entries["fa2"].speedup == pytest.approx(base / entries["fa2"].result.time_us)
    assert entries["fa2"].result.flops < entries["fa2 padded"].result.flops


@pytest.mark.parametrize("text", ["0,5", "a", "", "4,,5"])
def test_bad_lengths_are_one_line(text):
    with pytest.raises(InputError, match="256,1024,8192"):
        parse_lengths(text)
