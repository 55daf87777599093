"""Named facts of a call and a GPU, which rules compare: nothing else is known to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.dispatch.rule_base import RuleBase, Setting
from simulator.errors import InputError
from simulator.problem import PASSES, AttentionProblem
from simulator.profile import CAPABILITIES, Profile
from simulator.yaml_lines import nearest

KINDS = ("number", "bytes", "flag", "text", "set")


@dataclass(frozen=True)
class Fact:
    """Kind and meaning of a fact; a text has its words in ``words`` (empty: any)."""

    kind: str
    about: str
    words: tuple[str, ...] = ()


#: Facts that every rule base knows; a base adds its own as settings.
FACTS: dict[str, Fact] = {
    "batch": Fact("number", "sequences"),
    "heads": Fact("number", "query heads"),
    "kv_heads": Fact("number", "key/value heads"),
    "group": Fact("number", "query heads of one KV head"),
    "gqa": Fact("flag", "fewer KV heads than query heads"),
    "seqlen_q": Fact("number", "queries of each sequence"),
    "seqlen_k": Fact("number", "keys of each sequence"),
    "queries_in_group": Fact("number", "queries times query heads of one KV head"),
    "head_dim": Fact("number", "width of Q and K"),
    "head_dim_v": Fact("number", "width of V"),
    "dtype": Fact("text", "type of Q, K and V", ("fp16", "bf16", "fp8", "fp32", "fp64")),
    "causal": Fact("flag", "the causal flag is set"),
    "mask": Fact("text", "a mask that the call reads", ("none", "bool", "additive", "padding")),
    "dropout": Fact("number", "dropout probability"),
    "pass": Fact("text", "what is asked for", PASSES),
    "training": Fact("flag", "some input needs a gradient"),
    "deterministic": Fact("flag", "only deterministic algorithms are allowed"),
    "window": Fact("flag", "a sliding window is given"),
    "softcap": Fact("flag", "scores are capped"),
    "varlen": Fact("flag", "each sequence has its own length"),
    "page_size": Fact("number", "keys of one page of the KV cache (0: not paged)"),
    "num_splits": Fact("number", "splits of the keys that are asked for (0: the library's choice)"),
    "score_bytes_fp32": Fact("bytes", "the score matrix of all heads in fp32"),
    "input_bytes": Fact("bytes", "Q, K and V"),
    "compute_capability": Fact("number", "of the GPU, such as 9.0"),
    "capabilities": Fact("set", "instructions that the GPU has", CAPABILITIES),
    "smem_bytes_per_cta_max": Fact("bytes", "shared memory that one CTA can have"),
    "hbm_bytes": Fact("bytes", "device memory"),
}


def facts_of(problem: AttentionProblem, profile: Profile) -> dict[str, Any]:
    """The values of :data:`FACTS` for a call on a GPU."""
    p = problem
    scores = p.batch * p.heads * p.seqlen_q * p.seqlen_k
    inputs = p.heads * p.seqlen_q * p.head_dim + p.kv_heads * p.seqlen_k * (p.head_dim + p.head_dim_v)
    return {
        "batch": p.batch,
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "group": p.group,
        "gqa": p.heads != p.kv_heads,
        "seqlen_q": p.seqlen_q,
        "seqlen_k": p.seqlen_k,
        "queries_in_group": p.seqlen_q * p.group,
        "head_dim": p.head_dim,
        "head_dim_v": p.head_dim_v,
        "dtype": p.dtype,
        "causal": p.causal,
        "mask": p.mask or "none",
        "dropout": p.dropout,
        "pass": p.pass_,
        "training": p.pass_ != "fwd",
        "deterministic": p.deterministic,
        "window": p.window is not None,
        "softcap": p.softcap > 0,
        "varlen": p.seqlens_q is not None or p.seqlens_k is not None,
        "page_size": p.page_size or 0,
        "num_splits": p.num_splits or 0,
        "score_bytes_fp32": 4 * scores,
        "input_bytes": p.batch * inputs * p.element_bytes,
        "compute_capability": float(profile.compute_capability),
        "capabilities": profile.capabilities,
        "smem_bytes_per_cta_max": profile.smem_bytes_per_cta_max,
        "hbm_bytes": profile.hbm_bytes,
    }


def known_facts(settings: Mapping[str, Setting]) -> dict[str, Fact]:
    """Facts that a rule base may read: the common ones and its settings."""
    return FACTS | {name: Fact(setting.kind, setting.about, setting.words) for name, setting in settings.items()}


def with_settings(base: RuleBase, facts: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``facts`` with the base's settings at their defaults, and with what was ``given`` instead of either."""
    merged = dict(facts) | {name: value for name, value in given.items() if name in FACTS}
    for name, setting in base.settings.items():
        default = merged[setting.follows] if setting.follows else setting.default
        merged[name] = given.get(name, default)
    return merged


def parse_facts(base: RuleBase, texts: tuple[str, ...]) -> dict[str, Any]:
    """``NAME=VALUE`` texts as facts of ``base``; :class:`InputError` names what is unknown and what would be right."""
    known = known_facts(base.settings)
    facts = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise InputError(f"--fact {text}: no value; write NAME=VALUE, such as compute_capability=8.9")
        if name not in known:
            raise InputError(f"--fact {name}: unknown; {nearest(name, known)}")
        facts[name] = _parsed(name, known[name], value)
    return facts


def _parsed(name: str, fact: Fact, text: str) -> Any:
    if fact.kind == "flag":
        lowered = text.lower()
        if lowered not in ("yes", "no", "1", "0", "true", "false"):
            raise InputError(f"--fact {name}={text}: not a yes or no; write {name}=yes")
        return lowered in ("yes", "1", "true")
    if fact.kind in ("number", "bytes"):
        try:
            number = float(text)
        except ValueError:
            raise InputError(f"--fact {name}={text}: not a number; write for example {name}=8") from None
        return int(number) if number.is_integer() and "." not in text else number
    if fact.kind == "set":
        words = tuple(word.strip() for word in text.split("+") if word.strip())
        for word in words:
            _check_word(name, fact, word)
        return frozenset(words)
    _check_word(name, fact, text)
    return text


def _check_word(name: str, fact: Fact, word: str) -> None:
    if fact.words and word not in fact.words:
        raise InputError(f"--fact {name}={word}: unknown; {nearest(word, fact.words)}")


def value_text(kind: str, value: Any) -> str:
    """A fact's value for people."""
    from simulator.wording import scaled

    if kind == "bytes":
        return scaled(value, "B")
    if kind == "flag":
        return "yes" if value else "no"
    if kind == "set":
        return ", ".join(sorted(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
