"""``iosim model``: what it prints and writes, and one line for every mistake."""

import csv
import json

import pytest
from command_line import failure

from simulator.cli import main

TINY = ["model", "gpt2-small", "--batch", "1", "--seqlen", "256"]


def test_training_is_the_default_and_amdahl_is_stated(capsys, tmp_path):
    table, data = tmp_path / "kernels.csv", tmp_path / "all.json"
    assert main([*TINY, "--csv", str(table), "--json", str(data)]) == 0
    said = capsys.readouterr().out
    for words in ("one training micro-batch", "tokens/s", "MFU", "attention's share", "standard -> fa2", "Amdahl"):
        assert words in said
    rows = list(csv.DictReader(table.open()))
    assert {r["phase"] for r in rows} == {"forward", "backward", "step"}
    assert sum(float(r["share"]) for r in rows) == pytest.approx(1.0)
    run = json.loads(data.read_text())["run"]
    assert run["kind"] == "training" and run["attention"] == "fa2"
    assert run["gpu_us"] == pytest.approx(sum(float(r["time_us"]) for r in rows))


def test_decode_explains_itself(capsys):
    assert main(["model", "llama-3.2-1b", "--gpu", "h200_sxm", "--decode", "--context", "2048"]) == 0
    said = capsys.readouterr().out
    for words in ("FLOP/byte by batch", "FlashDecoding", "KV cache", "steps as long as prefill", "its group of 4"):
        assert words in said
    said = " ".join(said.split())
    assert "12.5% more bytes" in said and "splits help up to batch" in said


def test_prefill_without_a_comparison(capsys):
    arguments = ["model", "gpt2-small", "--prefill", "--batch", "1", "--seqlen", "256", "--against", "none"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "one prefill" in said and "Amdahl" not in said


def test_a_users_model(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\ntitle: Mine\nsource: me\nlayers: 2\nhidden: 256\nheads: 4\nkv_heads: 2\nhead_dim: 64\n"
        "ffn_size: 512\nffn_kind: swiglu\nvocab: 1000\nposition: rotary\nmax_positions: 512\nnorm: rmsnorm\n"
        "norm_placement: pre\nbias: none\ncausal: true\ntied_embeddings: true\npublished_parameters: 1M\n"
    )
    for kind in ("--training", "--prefill", "--decode"):
        assert main(["model", str(file), kind, "--batch", "1", "--context", "128", "--kernels", "0"]) == 0
    assert "Mine on a100_sxm4_80gb" in capsys.readouterr().out


def test_changing_the_gpu(capsys):
    def tokens_per_s(*more):
        assert main([*TINY, "--launch", "graph", "--against", "none", *more]) == 0
        line = next(x for x in capsys.readouterr().out.splitlines() if x.strip().startswith("tokens/s"))
        return float(line.split()[1])

    assert tokens_per_s("--set", "hbm_bandwidth=x4") > tokens_per_s()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["model"], "no model named"),
        (["model", "gpt2-smal"], "gpt2-small"),
        (["model", "gpt2-small", "--training", "--decode"], "exclude each other"),
        (["model", "gpt2-small", "--fusion", "partly"], "--fusion: 'partly' is unknown; use fused"),
        (["model", "gpt2-small", "--dtype", "fp8"], "--dtype"),
        (["model", "gpt2-small", "--batch", "0"], "--batch"),
        (["model", "gpt2-small", "--seqlen", "0"], "--seqlen"),
        (["model", "gpt2-small", "--dropout", "1"], "--dropout"),
        (["model", "gpt2-small", "--recompute", "half"], "--recompute"),
        (["model", "gpt2-small", "--attention", "flash_decoding"], "one query at a time"),
        (["model", "gpt2-small", "--attention", "fa3"], "a100_sxm4_80gb lacks"),
        (["model", "gpt2-small", "--launch", "later", "--batch", "1", "--seqlen", "128"], "--launch"),
        (["model", "bert-large", "--decode"], "encoder"),
        (["model", "llama-3-8b", "--published"], "no published number"),
        (["model", "gpt2-small", "--csv", "/no/such/folder/x.csv"], "does not exist"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, says):
    assert says in failure(capsys, *arguments)
