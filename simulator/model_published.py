"""Published whole-model numbers against predictions: ``hardware_profiles/published/training.csv``, row by row.

Every row is predicted from its model, GPU and attention, the micro-batch that its run's public configuration sets, and
the framework's kernel cut; no row has a parameter of its own. What is compared:

``model_tflops_per_gpu``, ``tokens_per_s_all_gpus``
    the same quantity of one GPU (all GPUs: times their number; no communication is modelled), FLOPs counted as the
    source counts them (:func:`source_flops_per_token`).
``days_of_training``, ``minutes_to_...``
    ratios to the first row of the same table, model and length: what a run needs to converge is not ours to predict.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from simulator.errors import InputError
from simulator.model_memory import largest_batch, least_recompute
from simulator.model_programs import Training
from simulator.model_run import ModelRun, model_flops_per_token, train
from simulator.model_shape import Shape
from simulator.model_styles import style_of
from simulator.model_times import Simulator
from simulator.model_zoo import TransformerModel, load_model
from simulator.profile import Profile, load_profile
from simulator.published import published_directory

#: Sequences a GPU of the repository's HuggingFace configurations (training/configs/experiment/{owt,pile}/*-hf.yaml of
#: github.com/Dao-AILab/flash-attention).
HUGGINGFACE_SEQUENCES = {
    "gpt2-small": 8, "gpt2-medium": 4, "gpt2-large": 2, "gpt2-xl": 1,
    "gpt3-125m": 8, "gpt3-355m": 4, "gpt3-760m": 2, "gpt3-1.3b": 2, "gpt3-2.7b": 1,
}  # fmt: skip
#: Models whose configurations shard the optimiser (``adamw-zero``, same place).
SHARDED = frozenset({"gpt2-large", "gpt2-xl", "gpt3-1.3b", "gpt3-2.7b"})
#: Tokens of a global batch (``global_batch_size`` x length, same place; BERT: 448 sequences, MLPerf 1.1).
GLOBAL_SEQUENCES = {"gpt2": 512, "gpt3-1.3b": 512, "gpt3-2.7b": 512, "gpt3": 256, "bert": 448}
#: GPT-3 at 8192 tokens: 128 sequences.
LONG_GLOBAL_SEQUENCES = 128
DROPOUT = 0.1

#: Framework of a row -> kernel cut (see :func:`_cut`).
STYLE_OF_FRAMEWORK = {
    "HuggingFace": "huggingface",
    "Huggingface": "huggingface",
    "Megatron-LM": "megatron",
    "FlashAttention repository": "fused",
    "FlashAttention repository without it": "fused",
}
#: The first paper's GPT-2 runs are of May 2022 (arXiv:2205.14135). The repository's fused layers came out on 2022-11-29
#: (Dao's announcement, threadreaderapp.com/thread/1597580603658231815), so its own run had Megatron's cut at most.
FIRST_PAPER = "arXiv:2205.14135"
#: Micro-batch and recomputation of Megatron-LM's public GPT-2 configuration of that time (examples/pretrain_gpt.sh at
#: 090e141c, ``--micro-batch-size 4 --checkpoint-activations``).
EARLY_MEGATRON = (4, "full")
#: What Megatron-LM's manual of 29 November 2022, the day of the repository's bars, recommends "in almost all cases"
#: (README.md at 52e63688: selective recomputation, which is that of attention).
MEGATRON_RECOMPUTE = "attention"
#: Source of the bars whose FLOPs are counted by Megatron-LM's formula.
REPOSITORY_BARS = "_training_efficiency.jpg"
#: Attention of NVIDIA's MLPerf 1.1 baseline over FlashAttention's, forward and backward at 512 tokens: Apex FMHA takes
#: 2.95 ms and FlashAttention 2.81 (arXiv:2205.14135, table 7). No program here follows that kernel.
APEX_FMHA_OVER_FA1 = 2.95 / 2.81

#: What slowed a published run beyond what is modelled, by framework (shown beside the row).
UNMODELLED = {
    "huggingface": "Lightning's callbacks, grad scaler, sorts of the embedding's gradient, 2022 kernels of PyTorch",
    "megatron": "neither micro-batch nor recomputation is published: the largest that fits, and attention's as its "
    "manual recommends (kept instead: up to 20 % faster); all-reduce of gradients; operators that its JIT left unfused",
    "fused": "all-reduce of gradients and ZeRO's exchange (2 % by the repository's comments), data loading",
    "days": "runs of May 2022: FlashAttention's taken with Megatron's cut, Megatron's with its example's "
    "recomputation. 400,000 steps (the repository's base.yaml) at the step times that its comments give three months "
    "later are 1.7 and 4.5 days for GPT-2 small and medium, the paper says 2.7 and 6.9: evaluation, checkpoints, data, "
    "that year's code",
    "mlperf": "its baseline's unpadding, LAMB and data pipeline; FA1's run skips unmasked tokens of the last layer",
}


@dataclass(frozen=True)
class Row:
    """One published number with its prediction. ``error`` is predicted over measured, minus one."""

    model: str
    gpu: str
    framework: str
    algorithm: str
    seqlen: int
    sequences: int
    metric: str
    measured: float
    predicted: float
    recompute: str
    source: str
    remark: str

    @property
    def error(self) -> float:
        """Signed relative error of the prediction (NaN where there is no number)."""
        return self.predicted / self.measured - 1.0 if self.measured else math.nan


class Predictor:
    """Runs published rows, equal kernels once."""

    def __init__(self, gpus: dict[str, Profile] | None = None) -> None:
        self._gpus = gpus or {}
        self._simulators: dict[tuple[str, str], Simulator] = {}
        self._runs: dict[tuple[object, ...], ModelRun] = {}

    def simulator(self, gpu: str, dtype: str) -> Simulator:
        """The simulator of ``gpu`` for ``dtype``."""
        key = (gpu, dtype)
        if key not in self._simulators:
            self._simulators[key] = Simulator(self._gpus.get(gpu) or load_profile(gpu), dtype)
        return self._simulators[key]

    def run(self, row: dict[str, str]) -> ModelRun:
        """The training run of a row of ``training.csv``."""
        model = load_model(row["model"])
        simulator = self.simulator(row["gpu"], row["dtype"])
        seqlen = int(row["seqlen"])
        fusion, attention = _cut(row), row["algorithm"] or "fa1"
        shards = int(row["gpus"]) if fusion != "megatron" and model.name in SHARDED else 1
        batch = self._batch(row, model, seqlen, fusion, attention, shards, simulator)
        per_gpu = max(1, _global_sequences(model, seqlen) // int(row["gpus"]))
        # the repository's runs keep all activations ("we don't need any activation checkpointing")
        recompute = "none" if attention != "standard" or fusion == "huggingface" else "auto"
        if fusion == "megatron" and attention == "standard":
            recompute = MEGATRON_RECOMPUTE
        if _is_early_megatron(row):
            batch, recompute = EARLY_MEGATRON
        key = (model.name, row["gpu"], row["dtype"], seqlen, fusion, attention, batch, recompute)
        if key not in self._runs:
            self._runs[key] = train(
                model,
                simulator,
                batch=batch,
                seqlen=seqlen,
                attention=attention,
                fusion=fusion,
                dropout=DROPOUT,
                recompute=recompute,
                accumulation=max(1, per_gpu // batch),
                optimizer_shards=shards,
            )
        return self._runs[key]

    def _batch(
        self,
        row: dict[str, str],
        model: TransformerModel,
        seqlen: int,
        fusion: str,
        attention: str,
        shards: int,
        simulator: Simulator,
    ) -> int:
        """The published micro-batch (halved until it fits), HuggingFace's configured one, or the largest that fits."""
        if fusion == "huggingface":
            return HUGGINGFACE_SEQUENCES[model.name]
        most = int(row["sequences_per_gpu"] or max(1, _global_sequences(model, seqlen) // int(row["gpus"])))
        training = Training(
            Shape(model, 1, seqlen, DROPOUT), style_of(fusion), attention, row["dtype"], optimizer_shards=shards
        )
        if fusion == "megatron" and attention == "standard":
            training = replace(training, recompute=MEGATRON_RECOMPUTE)
        elif attention == "standard":
            # computed again only where a single sequence would not fit otherwise
            training = least_recompute(training, simulator.gpu)
        return largest_batch(training, simulator.gpu, most)


def published_rows(models: Iterable[str] | None = None) -> list[dict[str, str]]:
    """Rows of ``training.csv`` (of some models), as text."""
    path = published_directory() / "training.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if models is None:
        return rows
    wanted = set(models)
    unknown = wanted - {row["model"] for row in rows}
    if unknown:
        known = ", ".join(dict.fromkeys(row["model"] for row in rows))
        raise InputError(f"no published number of {', '.join(sorted(unknown))}; there are some of {known}")
    return [row for row in rows if row["model"] in wanted]


def predict_published(rows: list[dict[str, str]], predictor: Predictor | None = None) -> list[Row]:
    """A prediction for each row, in order."""
    predictor = predictor or Predictor()
    out: list[Row] = []
    first: dict[tuple[str, ...], tuple[float, float]] = {}
    for row in rows:
        run = predictor.run(row)
        style = "mlperf" if row["model"].startswith("bert") else run.style
        measured = float(row["value"]) if row["value"] else math.nan
        rate = run.tokens_per_s * source_flops_per_token(row, run.model) / 1e12
        metric, predicted, remark = row["metric"], rate, UNMODELLED[style]
        if row["outcome"] == "OOM":
            metric, predicted = "memory_gb (out of memory)", run.memory.total_bytes / 1e9
            remark = "the estimate says it fits: buffers of gradients and fragmentation are missing in it"
            if not run.memory_fits:
                remark = "does not fit by the estimate either"
        elif metric == "tokens_per_s_all_gpus":
            predicted = run.tokens_per_s * int(row["gpus"])
        elif metric.startswith(("days", "minutes")):
            if metric.startswith("days"):
                remark = UNMODELLED["days"]
            metric = f"speed-up over the first row ({metric.split('_')[0]})"
            key = (row["source"], row["figure"], row["model"], row["metric"])
            seconds = _seconds_per_token(row, run)
            base = first.setdefault(key, (measured, seconds))
            measured, predicted = base[0] / measured, base[1] / seconds
        out.append(
            Row(
                row["model"], row["gpu"], row["framework"], row["algorithm"] or "Apex FMHA", int(row["seqlen"]),
                run.batch, metric, measured, predicted, run.recompute, f"{row['source'].split()[0]} {row['figure']}",
                remark,
            )
        )  # fmt: skip
    return out


def source_flops_per_token(row: dict[str, str], model: TransformerModel) -> float:
    """Model FLOPs of a training step by token, as the row's source counts them.

    The repository's bars: Megatron-LM's formula (arXiv:2104.04473, section 5.1) times 3/4, which takes the vocabulary's
    products at three quarters too (training/README.md; its tokens/s and TFLOP/s of one run agree on that). Others:
    :func:`~simulator.model_run.model_flops_per_token`.
    """
    seqlen = int(row["seqlen"])
    if REPOSITORY_BARS not in row["source"]:
        return model_flops_per_token(model, seqlen)
    hidden, layers = model.hidden, model.layers
    return 72.0 * layers * hidden**2 * (1.0 + seqlen / (6.0 * hidden) + model.vocab / (16.0 * layers * hidden))


def _is_first_paper(row: dict[str, str]) -> bool:
    return row["source"].startswith(FIRST_PAPER) and row["metric"].startswith("days")


def _is_early_megatron(row: dict[str, str]) -> bool:
    return _is_first_paper(row) and row["framework"] == "Megatron-LM"


def _cut(row: dict[str, str]) -> str:
    """The kernel cut of a row's framework, as it was at the time."""
    style = STYLE_OF_FRAMEWORK.get(row["framework"], "fused")
    return "megatron" if style == "fused" and _is_first_paper(row) else style


def _seconds_per_token(row: dict[str, str], run: ModelRun) -> float:
    time_us = run.time_us
    if not row["algorithm"]:
        time_us += run.attention_us * (APEX_FMHA_OVER_FA1 - 1.0)
    return time_us / run.tokens


def _global_sequences(model: TransformerModel, seqlen: int) -> int:
    if model.name.startswith("gpt3") and seqlen > 2048:
        return LONG_GLOBAL_SEQUENCES
    return GLOBAL_SEQUENCES.get(model.name) or GLOBAL_SEQUENCES[model.name.partition("-")[0]]
