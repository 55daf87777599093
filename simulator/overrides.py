"""``--set key=value``: a profile with some numbers changed, absolute with units or relative to what they were.

``hbm_bandwidth=8TB/s`` ``sram_per_sm=512KiB`` ``l2_bytes=x2`` ``smem_bytes_per_sm=*1.5`` ``tensor_rate=x2``
``tensor_flop_per_cycle_per_sm.wgmma.bf16=8192``. A key may be written without its unit suffix.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from simulator.profile import GROUP_KEYS, SCALAR_KEYS, FrozenMapping, Profile, Quantity, key_of
from simulator.profile_loader import bounded_number, check_consistency, checked_number, scale_followers
from simulator.yaml_lines import fail, nearest

WHERE = "--set"

# Short names that are not simply a key without its unit.
_ALIASES = {
    "sms": "num_sms",
    "sram_per_sm": "smem_bytes_per_sm",
    "smem_per_sm": "smem_bytes_per_sm",
    "sram": "smem_bytes_per_sm",
    "smem": "smem_bytes_per_sm",
    "tmem_per_sm": "tmem_bytes_per_sm",
    "l2": "l2_bytes",
    "l2_size": "l2_bytes",
    "hbm_size": "hbm_bytes",
    "hbm_capacity": "hbm_bytes",
    "tensor_rate": "tensor_flop_per_cycle_per_sm",
    "exp_rate": "exp_per_cycle_per_sm",
    "fma_rate": "fma_per_cycle_per_sm",
}
_UNIT_SUFFIX = re.compile(r"(_bytes_per_cycle_per_sm|_bytes_per_s|_per_cycle_per_sm|_hz|_w|_s|_cycles)$")
_RELATIVE = re.compile(r"[x*×]\s*(.+)")


def _alias_table() -> dict[str, str]:
    table = dict(_ALIASES)
    for key in SCALAR_KEYS:
        short = _UNIT_SUFFIX.sub("", key)
        if short != key:
            table.setdefault(short, key)
    return table


ALIASES = _alias_table()


def parse_overrides(texts: Iterable[str], profile: Profile) -> Profile:
    """``profile`` with the ``key=value`` texts applied; raises :class:`InputError` (one line)."""
    overrides: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or not value.strip():
            fail(WHERE, "", f"'{text}' is not an override", "write key=value, such as l2_bytes=x2")
        if key.strip() in overrides:
            fail(WHERE, key.strip(), "given twice", "keep one of them")
        overrides[key.strip()] = value.strip()
    return apply_overrides(profile, overrides)


def apply_overrides(profile: Profile, overrides: Mapping[str, str]) -> Profile:
    """``profile`` with ``{key: text}`` applied, named ``h100_sxm[l2_bytes=x2]``; raises :class:`InputError`.

    Numbers that follow a changed one (sustained bandwidths the datasheet's, the per-CTA limit the SM's shared memory,
    datasheet FLOP/s the tensor rate, SMs and clock) scale with it unless they are overridden too.
    """
    if not overrides:
        return profile
    before = dict(profile.values)
    after = dict(before)
    changed: dict[str, str] = {}  # canonical key -> the key as the user wrote it
    shown = []
    for written, text in overrides.items():
        keys = _keys_of(written, text, profile)
        for key in keys:
            if key in changed:
                fail(WHERE, written, f"changes {key} like '{changed[key]}'", "keep one of them")
            changed[key] = written
            after[key] = _overridden(key, str(text), before[key])
        # The name shows the canonical key, once for a whole group.
        group = written.split(".")[0]
        shown.append(f"{keys[0] if len(keys) == 1 else ALIASES.get(group, written)}={str(text).strip()}")
    after = scale_followers(before, after, set(changed))
    check_consistency(after, profile.capabilities, profile.name)
    stem, _, earlier = profile.name.partition("[")
    name = f"{stem}[{','.join([*filter(None, [earlier.rstrip(']')]), *shown])}]"
    return replace(profile, name=name, values=FrozenMapping(after))


def with_values(profile: Profile, numbers: Mapping[str, float], name: str | None = None) -> Profile:
    """``profile`` with plain numbers in base units, for sweeps: ``{"l2_bytes": 30e6}``; whole-number keys are rounded.

    Follows and checks like :func:`apply_overrides`.
    """
    texts = {}
    for key, number in numbers.items():
        known = _keys_of(key, repr(number), profile)[0]
        texts[known] = repr(round(number)) if key_of(known).integer else repr(float(number))
    changed = apply_overrides(profile, texts)
    return replace(changed, name=name) if name else changed


def _keys_of(written: str, text: str, profile: Profile) -> list[str]:
    """The canonical keys that a written one means: itself, its alias, or every member of a group scaled as a whole."""
    head, dot, rest = written.partition(".")
    key = ALIASES.get(head, head) + dot + rest
    if key in profile.values:
        return [key]
    members = [name for name in profile.values if name.startswith(f"{key}.")]
    if members:
        if not _RELATIVE.fullmatch(str(text).strip()):
            wrong = f"names {len(members)} values ({', '.join(m.removeprefix(key + '.') for m in members)})"
            fail(WHERE, written, wrong, "scale them all with xN, or name one")
        return members
    group = key.split(".")[0]
    if group in GROUP_KEYS:
        having = ", ".join(name for name in profile.values if name.startswith(f"{group}."))
        fail(WHERE, written, f"{profile.name} has no such value", f"it has {having}; add others in a 'base:' profile")
    close = nearest(head, [*SCALAR_KEYS, *GROUP_KEYS, *ALIASES])
    fail(WHERE, written, "unknown key", close)


def _overridden(key: str, text: str, old: Quantity) -> Quantity:
    relative = _RELATIVE.fullmatch(text.strip())
    if relative:
        try:
            factor = float(relative.group(1))
        except ValueError:
            factor = math.nan
        if not math.isfinite(factor):
            fail(WHERE, key, f"'{text}' is not a factor", "write x and a number, such as x2 or x0.5")
        product = old.value * factor
        value = bounded_number(key, round(product) if key_of(key).integer else product, WHERE)
    else:
        value = checked_number(key, text, WHERE)
    return Quantity(value, old.unit, "assumed", f"{WHERE} {key}={text} (was {old.value:.6g})", WHERE)


def override_dimensions() -> dict[str, str]:
    """Key or alias -> dimension, for help texts and for tools that search over hardware parameters."""
    names = {key: schema.dimension for key, schema in SCALAR_KEYS.items()}
    names |= {group: schema.dimension for group, (schema, _) in GROUP_KEYS.items()}
    return names | {alias: names[key] for alias, key in ALIASES.items()}
