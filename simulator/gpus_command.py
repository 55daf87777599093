"""``iosim gpus``: list the profiles, show one with every value's source, or show how two differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from simulator.errors import InputError
from simulator.profile import Profile, Quantity, key_of, load_profile, profile_names
from simulator.quantities import format_quantity

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
            raise InputError(f"gpus diff: {len(names) - 1} profiles given; write 'iosim gpus diff A B'")
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


def _print_list(console: Console, profiles: list[Profile]) -> None:
    from rich.table import Table

    table = Table(title="GPUs (dense datasheet figures)", title_justify="left")
    table.add_column("name", no_wrap=True)
    for heading in ("SMs", "clock MHz", "bf16 TFLOP/s", "HBM TB/s", "HBM GB", "L2 MiB", "SMEM KiB/SM", "ridge FLOP/B"):
        table.add_column(heading, justify="right")
    table.add_column("capabilities", overflow="fold")
    for p in profiles:
        table.add_row(
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
    console.print(table)
    console.print("[yellow]yellow[/]: a GPU that does not exist. 'iosim gpus NAME' shows every value with its source.")


def _print_profile(console: Console, profile: Profile) -> None:
    from rich.markup import escape
    from rich.table import Table

    console.print(f"[bold]{escape(profile.name)}[/]  {escape(profile.title)}")
    console.print(
        f"{profile.architecture}, compute capability {profile.compute_capability}"
        f"{f', base {profile.base}' if profile.base else ''}; capabilities: {' '.join(sorted(profile.capabilities))}",
        highlight=False,
    )
    table = Table(pad_edge=False)
    table.add_column("key", overflow="fold", min_width=30)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("source", overflow="fold", ratio=1)
    table.add_column("where", overflow="fold")
    for key, quantity in profile.values.items():
        file = quantity.location.replace("\\", "/").rsplit("/", 1)[-1]
        kind = f"[{_KIND_STYLE[quantity.kind]}]{quantity.kind}[/]"
        table.add_row(key, _shown(key, quantity), kind, escape(quantity.source), escape(file))
    console.print(table)
    ridges = [f"{dtype} {profile.ridge_flop_per_byte(dtype):.0f}" for dtype in sorted(profile.spec_tensor_flops)]
    console.print(f"ridge point, FLOP/byte: {', '.join(ridges)}", highlight=False)
    fitted = profile.calibration.parameters
    source = profile.calibration_source or "none"
    console.print(f"calibration from {source}: {len(fitted)} fitted parameters", highlight=False)
    for name, parameter in fitted.items():
        bounds = f"in [{parameter.low:.6g}, {parameter.high:.6g}]"
        console.print(f"  {name} = {parameter.value:.6g} {parameter.unit} {bounds}", highlight=False, markup=False)


def _print_diff(console: Console, first: Profile, second: Profile, differences: list) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{escape(first.name)} -> {escape(second.name)}", title_justify="left")
    table.add_column("key", overflow="fold")
    for heading in (first.name, second.name, "ratio"):
        table.add_column(escape(heading), justify="right", overflow="fold")
    table.add_column("kinds")
    for key, a, b in differences:
        ratio = f"x{b.value / a.value:.4g}" if a is not None and b is not None and a.value else "—"
        kinds = "/".join(q.kind if q else "—" for q in (a, b))
        table.add_row(key, _shown(key, a), _shown(key, b), ratio, kinds)
    console.print(table)
    same = len({*first.values, *second.values}) - len(differences)
    gained, lost = second.capabilities - first.capabilities, first.capabilities - second.capabilities
    if gained or lost:
        console.print(
            "capabilities: " + " ".join([*(f"+{name}" for name in sorted(gained)), *(f"-{n}" for n in sorted(lost))])
        )
    console.print(f"{same} values are equal.", highlight=False)
