"""Transformer models as data: the YAML files of ``simulator/models`` and any that a user writes in their form.

A :class:`TransformerModel` holds sizes only. What a layer costs is for the engine; what its matrices and caches
hold is counted here, once, from :meth:`TransformerModel.layer_linears`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from simulator.errors import InputError, did_you_mean, unknown
from simulator.problem import DTYPE_BYTES
from simulator.yaml_lines import compose, fail, pairs, scalar

_MODELS_DIRECTORY = Path(__file__).parent / "models"
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class Linear(NamedTuple):
    """A matrix multiplication by weights: ``[tokens, in_features] x [in_features, out_features]``, with bias or not."""

    name: str
    in_features: int
    out_features: int
    bias: bool


class TransformerModel(BaseModel):
    """Sizes of a dense transformer, as its YAML file gives them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.\-]*$")
    """Name that the command line takes: lower case, as the file is called."""
    title: str = Field(min_length=1)
    """Name for people."""
    source: str = Field(min_length=1)
    """Where the sizes come from."""
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    """Width of the residual stream."""
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    """Key and value heads; fewer than ``heads`` for grouped-query attention."""
    head_dim: int = Field(gt=0)
    """Not always ``hidden / heads``."""
    ffn_size: int = Field(gt=0)
    """Width inside the feed-forward block (of each of the two branches when gated)."""
    ffn_kind: Literal["gelu", "swiglu"]
    """``gelu``: two matrices. ``swiglu``: three, gate and up and down."""
    vocab: int = Field(gt=0)
    """Rows of the embedding as stored, with padding where the model has it."""
    position: Literal["learned", "rotary"]
    max_positions: int = Field(gt=0)
    """Longest context; a learned position embedding has that many rows."""
    norm: Literal["layernorm", "rmsnorm"]
    """``layernorm`` has a scale and a shift, ``rmsnorm`` a scale only."""
    norm_placement: Literal["pre", "post"]
    """``post`` (BERT) has one norm after the embeddings and none at the end; ``pre`` one at the end."""
    bias: Literal["all", "qkv", "none"]
    """Which linear layers of a block have a bias."""
    causal: bool
    """False for an encoder."""
    tied_embeddings: bool
    """The output projection reuses the token embedding."""
    extra_parameters: int = Field(default=0, ge=0)
    """What the fields above do not describe (BERT: token types, the head's transform)."""
    published_parameters: str | int
    """As published: a count (``124439808``) or a rounded one (``1.3B``)."""
    note: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> TransformerModel:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: {self.kv_heads} does not divide heads {self.heads}; each KV head serves a group"
            )
        _parse_count(self.published_parameters)
        return self

    def layer_linears(self) -> tuple[Linear, ...]:
        """The weight matrices of one layer in the order of execution; Q, K and V are one projection."""
        all_bias, qkv_bias = self.bias == "all", self.bias in ("all", "qkv")
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ffn_width = self.ffn_size * (2 if self.ffn_kind == "swiglu" else 1)
        return (
            Linear("qkv", self.hidden, q_width + 2 * kv_width, qkv_bias),
            Linear("attention_out", q_width, self.hidden, all_bias),
            Linear("ffn_in", self.hidden, ffn_width, all_bias),
            Linear("ffn_out", self.ffn_size, self.hidden, all_bias),
        )

    def output_linear(self) -> Linear:
        """The projection onto the vocabulary (its weights are the embedding's when tied)."""
        return Linear("lm_head", self.hidden, self.vocab, False)

    def layer_parameter_count(self) -> int:
        """Weights, biases and norms of one layer."""
        matrices = sum(m.in_features * m.out_features + m.bias * m.out_features for m in self.layer_linears())
        return matrices + 2 * self._norm_parameters()

    def parameter_count(self) -> int:
        """All parameters, the embedding counted once when tied."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        positions = self.max_positions * self.hidden if self.position == "learned" else 0
        one_more_norm = self._norm_parameters()
        layers = self.layers * self.layer_parameter_count()
        return layers + embeddings + positions + one_more_norm + self.extra_parameters

    def published_parameter_count(self) -> tuple[float, float]:
        """The published number of parameters and half a unit of its last printed digit."""
        return _parse_count(self.published_parameters)

    def doubt(self) -> str | None:
        """A sentence where the sizes count to other parameters than published (by more than rounding and 1 %): one of
        them is mistyped then."""
        count, (published, half_unit) = self.parameter_count(), self.published_parameter_count()
        if abs(count - published) <= half_unit + 0.01 * published:
            return None
        return f"its sizes count to {count:,} parameters, published_parameters says {self.published_parameters}"

    def kv_cache_bytes(self, batch: int, seqlen: int, dtype: str = "bf16") -> int:
        """Bytes of K and V of all layers for ``batch`` sequences of ``seqlen`` tokens in ``dtype``."""
        for name, value in (("batch", batch), ("seqlen", seqlen)):
            if value < 0:
                raise InputError(f"{name}: {value} is negative; give 0 or more")
        if dtype not in DTYPE_BYTES:
            raise unknown("dtype", dtype, ("fp16", "bf16", "fp8", "fp32"))
        return 2 * self.layers * batch * seqlen * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def _norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm == "layernorm" else 1)


def _parse_count(text: str | int) -> tuple[float, float]:
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?([KMBT]?)", str(text))
    if match is None:
        raise ValueError(f"published_parameters: {text!r} is no count; write 124439808 or 1.3B")
    whole, decimals, suffix = match[1], match[2] or "", match[3]
    unit = _SUFFIXES.get(suffix, 1)
    return int(whole + decimals) * unit / 10 ** len(decimals), unit / 10 ** len(decimals) / 2


def model_names() -> list[str]:
    """Names of the shipped models, sorted."""
    return sorted(path.stem for path in _MODELS_DIRECTORY.glob("*.yaml"))


def load_model(name_or_path: str | Path) -> TransformerModel:
    """A shipped model by name, or one from a YAML file (a path has a slash or ends in ``.yaml``).

    Raises :class:`InputError`, one line with file, line and key, for an unknown name or a wrong file.
    """
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")) or "/" in text or "\\" in text:
        return _read_model(Path(text))
    if text not in model_names():
        hint = did_you_mean(text, model_names())
        raise InputError(f"unknown model '{text}'; {hint}known: {', '.join(model_names())}, or a path ending in .yaml")
    return _read_model(_MODELS_DIRECTORY / f"{text}.yaml")


def _read_model(path: Path) -> TransformerModel:
    values, lines = _read_mapping(path)
    try:
        return TransformerModel(**values)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # a mistyped key is both missing and unknown: the line that is there says more
        unknown_keys = [e for e in found if e["type"] == "extra_forbidden"]
        _fail(path, lines, (unknown_keys or found)[0])


def _read_mapping(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Values of the file and the line on which each key stands."""
    root = compose(path, "a model", "expected 'key: value' lines, as in simulator/models/gpt2-small.yaml")
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, node in pairs(root, str(path), ""):
        line = key.start_mark.line + 1
        if not isinstance(node, yaml.ScalarNode):
            fail(f"{path}:{line}", key.value, "not a single value", f"write '{key.value}: value'")
        values[key.value], lines[key.value] = scalar(node), line
    return values, lines


def _fail(path: Path, lines: dict[str, int], error: Mapping[str, Any]) -> NoReturn:
    """One line for pydantic's first complaint."""
    if error["type"] == "value_error":
        # A check across keys (or of a count): its message starts with the key that is wrong.
        message = str(error["ctx"]["error"])
        raise InputError(f"{path}:{lines.get(message.partition(':')[0], 1)}: {message}")
    key = str(error["loc"][0])
    where = f"{path}:{lines.get(key, 1)}: {key}"
    if error["type"] == "missing":
        raise InputError(f"{where}: missing; add a line '{key}: ...'")
    if error["type"] == "extra_forbidden":
        known = list(TransformerModel.model_fields)
        hint = did_you_mean(key, known).strip() or f"known: {', '.join(known)}"
        raise InputError(f"{where}: unknown key; {hint}")
    reason = error["msg"][0].lower() + error["msg"][1:]
    raise InputError(f"{where}: {error['input']!r} is wrong; {reason}")
