"""``iosim gpus``: list the profiles, show one with every value's source, or show how two differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from simulator.errors import InputError
from simulator.profile import Profile, Quantity, key_of, load_profile, profile_names
from simulator.quantities import format_quantity
from simulator.tables import print_table

if TYPE_CHECKING:
    from rich.console import Console

_KIND_STYLE = {"spec": "green", "measured": "cyan", "assumed": "yellow"}


def register(app: typer.Typer) -> None:
    """Add the ``gpus`` command to ``app``."""
    app.command("gpus")(gpus)


def gpus(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME | diff A B]", help="A profile's name or YAML file; 'diff A B' compares two."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a value: l2_bytes=x2, hbm_bandwidth=8TB/s (repeatable).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """List the GPUs, show one with the source of every number, or compare two.

    iosim gpus | iosim gpus h100_sxm | iosim gpus diff h100_sxm h200_sxm | iosim gpus diff h100_sxm my_gpu.yaml
    """
    from rich.console import Console

    names = names or []
    if names and names[0] == "diff":
        if len(names) != 3:
            raise InputError(f"gpus diff: takes two profiles, {len(names) - 1} given; write 'iosim gpus diff A B'")
        first, second = load_profile(names[1]), _load(names[2], overrides)
        differences = profile_differences(first, second)
        if as_json:
            print(json.dumps({key: [_json(a), _json(b)] for key, a, b in differences}, indent=2))
        else:
            _print_diff(Console(), first, second, differences)
    elif len(names) > 1:
        raise InputError(f"gpus: {len(names)} names given; write one name, or 'iosim gpus diff A B'")
    elif names:
        profile = _load(names[0], overrides)
        if as_json:
            print(json.dumps(profile_as_dict(profile), indent=2))
        else:
            _print_profile(Console(), profile)
    else:
        if overrides:
            raise InputError("gpus: --set without a profile; write 'iosim gpus NAME --set key=value'")
        profiles = [load_profile(name) for name in profile_names()]
        if as_json:
            print(json.dumps({profile.name: profile_as_dict(profile) for profile in profiles}, indent=2))
        else:
            _print_list(Console(), profiles)


def _load(name: str, overrides: list[str] | None) -> Profile:
    profile = load_profile(name)
    if overrides:
        from simulator.overrides import parse_overrides

        profile = parse_overrides(overrides, profile)
    return profile


def _json(quantity: Quantity | None) -> dict[str, object] | None:
    return None if quantity is None else vars(quantity)


def profile_as_dict(profile: Profile) -> dict[str, object]:
    """Everything that a profile says, as plain data."""
    return {
        "name": profile.name,
        "title": profile.title,
        "architecture": profile.architecture,
        "compute_capability": profile.compute_capability,
        "capabilities": sorted(profile.capabilities),
        "base": profile.base,
        "hypothetical": profile.is_hypothetical,
        "path": profile.path,
        "values": {key: _json(quantity) for key, quantity in profile.values.items()},
        "calibration": {"source": profile.calibration_source, "parameters": profile.calibration_parameters},
    }


def profile_differences(first: Profile, second: Profile) -> list[tuple[str, Quantity | None, Quantity | None]]:
    """(key, value in the first or None, value in the second or None) of every key whose numbers differ."""
    keys = [*first.values, *(key for key in second.values if key not in first.values)]
    pairs = [(key, first.values.get(key), second.values.get(key)) for key in keys]
    return [(key, a, b) for key, a, b in pairs if a is None or b is None or a.value != b.value]


def _shown(key: str, quantity: Quantity | None) -> str:
    return "—" if quantity is None else format_quantity(quantity.value, key_of(key).dimension)


#: Characters from which a profile is a table with a column of sources.
_WIDE = 120


def _print_list(console: Console, profiles: list[Profile]) -> None:
    rates = ("SMs", "clock\nMHz", "bf16\nTFLOP/s", "HBM\nTB/s", "HBM\nGB", "L2\nMiB", "SMEM\nKiB/SM", "ridge\nFLOP/B")
    rows = []
    for p in profiles:
        cells = (
            f"[yellow]{p.name}[/]" if p.is_hypothetical else p.name,
            str(p.num_sms),
            f"{p.max_clock_hz / 1e6:.0f}",
            f"{p.spec_tensor_flops['bf16'] / 1e12:.0f}" if "bf16" in p.spec_tensor_flops else "—",
            f"{p.hbm_bandwidth_bytes_per_s / 1e12:.3f}",
            f"{p.hbm_bytes / 1e9:.0f}",
            f"{p.l2_bytes / 2**20:.4g}",
            f"{p.smem_bytes_per_sm / 2**10:.4g}",
            f"{p.ridge_flop_per_byte('bf16'):.0f}" if "bf16" in p.spec_tensor_flops else "—",
            " ".join(sorted(p.capabilities)),
        )
        rows.append(cells)
    console.print("[bold]GPUs[/] (dense datasheet figures)")
    print_table(console, ("name", *rates, "capabilities"), rows, prose=("capabilities",))
    console.print("[yellow]yellow[/]: a GPU that does not exist. 'iosim gpus NAME' shows every value with its source.")


def _print_profile(console: Console, profile: Profile) -> None:
    from rich.markup import escape
    from rich.padding import Padding

    console.print(f"[bold]{escape(profile.name)}[/]  {escape(profile.title)}")
    console.print(
        f"{profile.architecture}, compute capability {profile.compute_capability}"
        f"{f', base {profile.base}' if profile.base else ''}; capabilities: {' '.join(sorted(profile.capabilities))}",
        highlight=False,
    )
    rows = []
    for key, quantity in profile.values.items():
        file = quantity.location.replace("\\", "/").rsplit("/", 1)[-1]
        kind = f"[{_KIND_STYLE[quantity.kind]}]{quantity.kind}[/]"
        rows.append((key, _shown(key, quantity), kind, escape(quantity.source), escape(file)))
    if console.width >= _WIDE:
        headings = ("key", "value", "kind", "source", "where")
        print_table(console, headings, rows, left=("kind", "where"), prose=("source",))
    else:
        # sources below their values
        width = max((len(row[0]) for row in rows), default=0)
        for key, value, kind, source, file in rows:
            console.print(f"{key:<{width}}  {value:>16}  {kind}", highlight=False)
            console.print(Padding(f"[dim]{source} ({file})[/]", (0, 0, 0, 4)), highlight=False)
    ridges = [f"{dtype} {profile.ridge_flop_per_byte(dtype):.0f}" for dtype in sorted(profile.spec_tensor_flops)]
    console.print(f"ridge point, FLOP/byte: {', '.join(ridges)}", highlight=False)
    fitted = profile.calibration.parameters
    source = profile.calibration_source or "none"
    console.print(f"calibration from {source}: {len(fitted)} fitted parameters", highlight=False)
    for name, parameter in fitted.items():
        bounds = f"in [{parameter.low:.6g}, {parameter.high:.6g}]"
        console.print(f"  {name} = {parameter.value:.6g} {parameter.unit} {bounds}", highlight=False, markup=False)


def _print_diff(
    console: Console,
    first: Profile,
    second: Profile,
    differences: Sequence[tuple[str, Quantity | None, Quantity | None]],
) -> None:
    from rich.markup import escape

    rows = []
    for key, a, b in differences:
        ratio = f"x{b.value / a.value:.4g}" if a is not None and b is not None and a.value else "—"
        kinds = "/".join(q.kind if q else "—" for q in (a, b))
        values = _shown(key, a), _shown(key, b)
        if console.width < _WIDE:
            key = key.replace(".", "\n  .", 1)
        rows.append((key, values[0], values[1], ratio, kinds))
    console.print(f"[bold]{escape(first.name)} -> {escape(second.name)}[/]", highlight=False)
    # names of changed GPUs list what was changed
    heads = [escape(profile.name.replace("[", "\n[").replace(",", ",\n")) for profile in (first, second)]
    print_table(console, ("key", *heads, "ratio", "kinds"), rows, left=("kinds",))
    same = len({*first.values, *second.values}) - len(differences)
    gained, lost = second.capabilities - first.capabilities, first.capabilities - second.capabilities
    if gained or lost:
        console.print(
            "capabilities: " + " ".join([*(f"+{name}" for name in sorted(gained)), *(f"-{n}" for n in sorted(lost))])
        )
    console.print(f"{same} values are equal.", highlight=False)
