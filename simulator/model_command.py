"""``iosim model``: attention inside a whole model, in training, prefill and decode."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.model_run import ModelRun
    from simulator.model_times import Simulator
    from simulator.model_zoo import TransformerModel

#: Batches and contexts of the tables of ``--decode``; the asked ones are added.
DECODE_BATCHES = (1, 8, 32, 128)
DECODE_CONTEXTS = (1024, 4096, 16_384, 65_536)
DTYPES = ("bf16", "fp16")


def register(app: typer.Typer) -> None:
    """Add the ``model`` command to ``app``."""
    app.command("model")(model)


def model(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE.yaml", help="A shipped model such as gpt2-medium, or a file.")
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help="A name of 'iosim gpus' or a YAML file.")] = "a100_sxm4_80gb",
    training: Annotated[bool, typer.Option("--training", help="One training micro-batch (the default).")] = False,
    prefill: Annotated[bool, typer.Option("--prefill", help="All tokens of the prompts at once.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="One token a sequence behind a KV cache.")] = False,
    attention: Annotated[
        str | None,
        typer.Option("--attention", help="fa1, fa2, fa3, standard; flash_decoding to decode. Default: the GPU's best."),
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="Another attention to swap it with; none: no comparison.")
    ] = "standard",
    batch: Annotated[int, typer.Option("--batch", help="Sequences (of a micro-batch).")] = 8,
    seqlen: Annotated[int | None, typer.Option("--seqlen", help="Tokens a sequence (default: 1024 or 2048).")] = None,
    context: Annotated[int, typer.Option("--context", help="Tokens in the KV cache (--decode).")] = 8192,
    dtype: Annotated[str, typer.Option("--dtype", help="bf16 or fp16.")] = "bf16",
    fusion: Annotated[
        str, typer.Option("--fusion", help="Kernel cut in training: fused, megatron or huggingface.")
    ] = "fused",
    dropout: Annotated[float, typer.Option("--dropout", help="Dropout probability in training.")] = 0.0,
    recompute: Annotated[
        str, typer.Option("--recompute", help="Computed again in backward: auto, none, attention, full.")
    ] = "auto",
    accumulation: Annotated[int, typer.Option("--accumulation", help="Micro-batches an optimiser step.")] = 1,
    optimizer_shards: Annotated[
        int, typer.Option("--optimizer-shards", help="GPUs that share the optimiser's state (ZeRO-1).")
    ] = 1,
    launch: Annotated[
        str | None, typer.Option("--launch", help="eager (host-bound if slow) or graph (default to decode).")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the GPU: l2_bytes=x2 (repeatable).")
    ] = None,
    kernels: Annotated[int, typer.Option("--kernels", min=0, help="Longest kernels to list.")] = 8,
    published: Annotated[
        bool, typer.Option("--published", help="Predict the published whole-model numbers (of NAME, or all: minutes).")
    ] = False,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write a row a kernel.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything.")] = None,
) -> None:
    """A whole model on one GPU: where the time goes, attention's share, and what a faster attention buys.

    One GPU is modelled: no communication, no data loading. Each distinct kernel is simulated once.
    """
    from rich.console import Console

    from simulator.compare_command import check_files

    check_files(csv_file, json_file)
    console = Console(markup=False)
    if published:
        _published(console, name, csv_file, json_file)
        return
    if name is None:
        raise InputError("model: no model named; write for example 'iosim model gpt2-medium' (or --published)")
    if training + prefill + decode > 1:
        raise InputError("model: --training, --prefill and --decode exclude each other; give one of them")
    if dtype not in DTYPES:
        raise InputError(f"--dtype: {dtype!r} is not modelled for whole models; use {' or '.join(DTYPES)}")
    from simulator.model_times import Simulator
    from simulator.model_zoo import load_model
    from simulator.options import RunOptions

    chosen = load_model(name)
    profile = RunOptions(overrides=tuple(overrides or ())).profile(gpu)
    simulator = Simulator(profile, dtype)
    kind = "decode" if decode else "prefill" if prefill else "training"
    length = context if decode else min(2048, chosen.max_positions) if seqlen is None else seqlen
    first = attention or _best_attention(profile, kind)

    def run(which: str) -> ModelRun:
        from simulator import model_run

        if kind == "decode":
            return model_run.decode(
                chosen, simulator, batch=batch, context=length, attention=which, launch=launch or "graph"
            )
        if kind == "prefill":
            return model_run.prefill(
                chosen, simulator, batch=batch, seqlen=length, attention=which, launch=launch or "eager"
            )
        return model_run.train(
            chosen,
            simulator,
            batch=batch,
            seqlen=length,
            attention=which,
            fusion=fusion,
            dropout=dropout,
            recompute=recompute,
            accumulation=accumulation,
            optimizer_shards=optimizer_shards,
            launch=launch or "eager",
        )

    _report(console, chosen, simulator, run, kind, first, against, length, batch, kernels, csv_file, json_file)


def _report(
    console: Any,
    chosen: TransformerModel,
    simulator: Simulator,
    run: Any,
    kind: str,
    first: str,
    against: str | None,
    length: int,
    batch: int,
    kernels: int,
    csv_file: Path | None,
    json_file: Path | None,
) -> None:
    """Run what was asked, print it, and write the files."""
    from simulator import model_decode
    from simulator.model_run import Swap
    from simulator.model_table import kernel_rows, print_decode, print_run, run_summary

    main = run(first)
    swap = None
    if against not in (None, "none", first):
        other = run(against)
        slower, faster = (other, main) if other.attention_us >= main.attention_us else (main, other)
        swap = Swap(slower, faster)
    print_run(console, main, swap, kernels)
    data = {"run": run_summary(main), "kernels": kernel_rows(main)}
    if swap is not None:
        data["swap"] = {
            "slower": run_summary(swap.slower),
            "faster": run_summary(swap.faster),
            "attention_speedup": swap.attention_speedup,
            "speedup": swap.speedup,
            "amdahl": swap.amdahl,
            "limit": swap.limit,
        }
    if kind == "decode":
        batches = tuple(sorted({*DECODE_BATCHES, batch}))
        contexts = tuple(sorted({*(c for c in DECODE_CONTEXTS if c <= 4 * length), length}))
        whole = _best_attention(simulator.gpu, "prefill")
        intensity = model_decode.intensities(chosen, simulator, length, batches)
        gains = model_decode.split_gains(chosen, simulator, length, batches)
        crossed = model_decode.crossings(chosen, simulator, batch, contexts, whole)
        groups = model_decode.group_intensities(chosen, simulator, batch, length)
        floor = model_decode.cache_floor(main, simulator)
        print_decode(console, floor, intensity, gains, crossed, groups, chosen.heads // chosen.kv_heads)
        data["floor"] = vars(floor) | {"floor_us": floor.floor_us}
        data["intensity"] = [vars(i) for i in intensity]
        data["groups"] = [vars(g) for g in groups]
        data["splits"] = [vars(g) | {"gain": g.gain} for g in gains]
        data["contexts"] = [
            {"context": c.context, "prefill": run_summary(c.prefill), "decode": run_summary(c.decode)} for c in crossed
        ]
    _write(csv_file, json_file, kernel_rows(main), data)


def _published(console: Any, name: str | None, csv_file: Path | None, json_file: Path | None) -> None:
    from simulator.model_published import predict_published, published_rows
    from simulator.model_table import print_published, published_data

    rows = predict_published(published_rows(None if name is None else [name]))
    print_published(console, rows)
    data = published_data(rows)
    _write(csv_file, json_file, data, data)


def _best_attention(gpu: Any, kind: str) -> str:
    """FlashDecoding to decode, FA3 where its instructions exist, else FA2."""
    if kind == "decode":
        return "flash_decoding"
    return "fa3" if {"wgmma", "tma"} <= set(gpu.capabilities) else "fa2"


def _write(csv_file: Path | None, json_file: Path | None, rows: list[dict[str, Any]], data: Any) -> None:
    from simulator.atomic_write import write_json, write_text

    if csv_file is not None:
        stream = io.StringIO()
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(csv_file, stream.getvalue())
    if json_file is not None:
        write_json(json_file, _finite(data))


def _finite(data: Any) -> Any:
    """``data`` with null for what JSON has no word for."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    if hasattr(data, "item"):
        data = data.item()
    return None if isinstance(data, float) and not math.isfinite(data) else data
