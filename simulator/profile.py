"""A GPU as data: the schema of a hardware profile and the immutable :class:`Profile` that the engine reads.

The numbers live in ``hardware_profiles/*.yaml``; each carries its kind (spec, measured or assumed) and its source.
What a calibration fitted is kept apart from them, in :attr:`Profile.calibration`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from simulator.errors import InputError, UnsupportedError

KINDS = ("spec", "measured", "assumed")
ARCHITECTURES = ("ampere", "hopper", "blackwell")
CAPABILITIES = ("mma_sync", "cp_async", "wgmma", "tma", "tcgen05", "tmem", "fp8_tensor", "cluster")
TENSOR_PATHS = ("mma_sync", "wgmma", "tcgen05")
TENSOR_DTYPES = ("fp16", "bf16", "fp8")


def tensor_dtype(dtype: str) -> str:
    """The input type whose tensor rate ``dtype`` is judged by: its own, or bf16's for what tensor cores do not take."""
    return dtype if dtype in TENSOR_DTYPES else "bf16"


@dataclass(frozen=True)
class Key:
    """What a profile says about one key: dimension (see ``quantities.DIMENSIONS``), type, lower bound, meaning."""

    unit: str
    dimension: str
    about: str
    integer: bool = False
    zero_allowed: bool = False


def _count(about: str) -> Key:
    return Key("", "count", about, integer=True)


def _size(about: str, zero_allowed: bool = False) -> Key:
    return Key("B", "bytes", about, integer=True, zero_allowed=zero_allowed)


def _bandwidth(about: str) -> Key:
    return Key("B/s", "bytes/s", about)


def _time(about: str) -> Key:
    return Key("s", "s", about, zero_allowed=True)


def _rate(about: str) -> Key:
    return Key("1/cycle", "ops/cycle", about)


# The scalar keys of a profile, in the order in which they are shown.
SCALAR_KEYS: dict[str, Key] = {
    "num_sms": _count("enabled streaming multiprocessors"),
    "max_clock_hz": Key("Hz", "hz", "SM boost clock that an unloaded GPU reaches"),
    "spec_clock_hz": Key("Hz", "hz", "SM clock behind the datasheet's tensor FLOP/s"),
    "power_cap_w": Key("W", "w", "board power limit"),
    "tensor_energy_j_per_flop": Key("J/FLOP", "j/flop", "a 16-bit tensor FLOP on random data at the spec clock"),
    "exp_per_cycle_per_sm": _rate("exp2 results of the special-function units"),
    "fma_per_cycle_per_sm": _rate("FP32 FMA, ADD or MUL results"),
    "alu_per_cycle_per_sm": _rate("min, max, select, compare and logic results"),
    "convert_per_cycle_per_sm": _rate("FP32 values converted to a 16-bit type"),
    "issue_slots_per_cycle_per_sm": _rate("warp instructions issued"),
    "registers_per_sm": _count("32-bit registers"),
    "smem_bytes_per_sm": _size("shared memory that the CTAs of one SM can share"),
    "smem_bytes_per_cta_max": _size("shared memory that one CTA can have"),
    "l1_smem_bytes_per_sm": _size("L1 cache and shared memory together"),
    "smem_bandwidth_bytes_per_cycle_per_sm": Key("B/cycle", "bytes/cycle", "shared-memory port, reads or writes"),
    "smem_latency_cycles": Key("cycles", "cycles", "shared-memory load latency", zero_allowed=True),
    "tmem_bytes_per_sm": _size("tensor memory (0: none)", zero_allowed=True),
    "max_threads_per_sm": _count("resident threads"),
    "max_ctas_per_sm": _count("resident CTAs"),
    "l2_bytes": _size("L2 cache, all partitions"),
    "l2_partitions": _count("L2 partitions"),
    "l2_bandwidth_bytes_per_s": _bandwidth("L2 read bandwidth that all SMs together see"),
    "l2_latency_s": _time("L2 hit latency"),
    "l2_read_sharers": _count("neighbouring SMs whose equal reads in step reach L2 once (1: none)"),
    "l2_to_sm_bandwidth_bytes_per_cycle_per_sm": Key("B/cycle", "bytes/cycle", "one SM's port to L2"),
    "hbm_bytes": _size("device memory"),
    "hbm_bandwidth_bytes_per_s": _bandwidth("datasheet HBM bandwidth"),
    "hbm_sustained_read_bytes_per_s": _bandwidth("HBM bandwidth that a large read reaches"),
    "hbm_sustained_copy_bytes_per_s": _bandwidth("HBM bandwidth, read plus write, that a large copy reaches"),
    "hbm_latency_s": _time("load latency that misses L2"),
    "launch_overhead_s": _time("gap between dependent kernels launched back to back in a stream"),
    "graph_launch_overhead_s": _time("gap between dependent kernels replayed from a CUDA graph"),
    "cta_launch_latency_s": _time("a CTA's slot becoming free to its successor's first instruction"),
}

#: Scalar keys that a profile may leave out: value and source of what is taken then.
DEFAULTS: dict[str, tuple[float, str]] = {
    "tensor_energy_j_per_flop": (1.48e-12, "no figure of this GPU: an H200's, our micro_run1.csv, a GEMM for a second"),
}

#: Keys that describe a GPU but on which no prediction of a single attention call depends: launch costs and what power
#: does to its clock are calibrated as they were measured, the rest does not bind these kernels. Changing one warns.
UNREAD_KEYS = frozenset(
    {
        "power_cap_w",
        "tensor_energy_j_per_flop",
        "smem_latency_cycles",
        "tmem_bytes_per_sm",
        "l1_smem_bytes_per_sm",
        "hbm_sustained_copy_bytes_per_s",
        "launch_overhead_s",
        "graph_launch_overhead_s",
        "cta_launch_latency_s",
    }
)

# The nested keys: group -> (their Key, the names allowed at each level below the group).
GROUP_KEYS: dict[str, tuple[Key, tuple[tuple[str, ...], ...]]] = {
    "tensor_flop_per_cycle_per_sm": (
        Key("FLOP/cycle", "flop/cycle", "dense tensor-core rate by instruction path and input type"),
        (TENSOR_PATHS, TENSOR_DTYPES),
    ),
    "spec_tensor_flops": (
        Key("FLOP/s", "flop/s", "datasheet's dense tensor rate by input type"),
        (TENSOR_DTYPES,),
    ),
}


def key_of(name: str) -> Key:
    """The schema entry of a scalar key or of a dotted one (``tensor_flop_per_cycle_per_sm.wgmma.bf16``)."""
    group = name.split(".", 1)[0]
    return SCALAR_KEYS[name] if name in SCALAR_KEYS else GROUP_KEYS[group][0]


class FrozenMapping(Mapping[str, Any]):
    """A read-only, picklable mapping (``MappingProxyType`` cannot be pickled to a worker process)."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items = {k: FrozenMapping(v) if isinstance(v, dict) else v for k, v in (items or {}).items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class Quantity:
    """One number of a profile with everything that is known about it."""

    value: float
    unit: str
    kind: str
    source: str
    location: str  # "file:line", or "--set" for an override


@dataclass(frozen=True)
class CalibrationParameter:
    """A fitted physical quantity and the bounds that it had to stay within."""

    value: float
    unit: str
    low: float
    high: float
    identified_by: str = ""
    details: Mapping[str, Any] = field(default_factory=FrozenMapping)  # whatever else the fit recorded


@dataclass(frozen=True)
class Calibration:
    """Fitted parameters and where they came from; ``source`` is the profile whose file holds them (None: none)."""

    source: str | None = None
    parameters: Mapping[str, CalibrationParameter] = field(default_factory=FrozenMapping)
    provenance: Mapping[str, Any] = field(default_factory=FrozenMapping)


@dataclass(frozen=True, eq=False)
class Profile:
    """One GPU. Immutable; two profiles are equal when name, capabilities, numbers and calibration are.

    Every scalar key of the schema is also an attribute (``profile.l2_bytes``); ``values`` has unit, kind and source
    of each, nested ones under their dotted name.
    """

    name: str
    title: str
    architecture: str
    compute_capability: str
    capabilities: frozenset[str]
    base: str | None
    values: Mapping[str, Quantity]
    calibration: Calibration
    path: str  # the YAML file it was read from

    num_sms: int = field(init=False)
    max_clock_hz: float = field(init=False)
    spec_clock_hz: float = field(init=False)
    power_cap_w: float = field(init=False)
    tensor_energy_j_per_flop: float = field(init=False)
    exp_per_cycle_per_sm: float = field(init=False)
    fma_per_cycle_per_sm: float = field(init=False)
    alu_per_cycle_per_sm: float = field(init=False)
    convert_per_cycle_per_sm: float = field(init=False)
    issue_slots_per_cycle_per_sm: float = field(init=False)
    registers_per_sm: int = field(init=False)
    smem_bytes_per_sm: int = field(init=False)
    smem_bytes_per_cta_max: int = field(init=False)
    l1_smem_bytes_per_sm: int = field(init=False)
    smem_bandwidth_bytes_per_cycle_per_sm: float = field(init=False)
    smem_latency_cycles: float = field(init=False)
    tmem_bytes_per_sm: int = field(init=False)
    max_threads_per_sm: int = field(init=False)
    max_ctas_per_sm: int = field(init=False)
    l2_bytes: int = field(init=False)
    l2_partitions: int = field(init=False)
    l2_bandwidth_bytes_per_s: float = field(init=False)
    l2_latency_s: float = field(init=False)
    l2_read_sharers: int = field(init=False)
    l2_to_sm_bandwidth_bytes_per_cycle_per_sm: float = field(init=False)
    hbm_bytes: int = field(init=False)
    hbm_bandwidth_bytes_per_s: float = field(init=False)
    hbm_sustained_read_bytes_per_s: float = field(init=False)
    hbm_sustained_copy_bytes_per_s: float = field(init=False)
    hbm_latency_s: float = field(init=False)
    launch_overhead_s: float = field(init=False)
    graph_launch_overhead_s: float = field(init=False)
    cta_launch_latency_s: float = field(init=False)
    tensor_flop_per_cycle_per_sm: Mapping[str, Mapping[str, float]] = field(init=False)
    spec_tensor_flops: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        for key in SCALAR_KEYS:
            object.__setattr__(self, key, self.values[key].value)
        for group in GROUP_KEYS:
            nested: dict[str, Any] = {}
            for dotted, quantity in self.values.items():
                head, *path = dotted.split(".")
                if head == group:
                    level = nested
                    for name in path[:-1]:
                        level = level.setdefault(name, {})
                    level[path[-1]] = quantity.value
            object.__setattr__(self, group, FrozenMapping(nested))

    @property
    def calibration_source(self) -> str | None:
        """Name of the profile whose fitted parameters are used; None when there is no calibration section."""
        return self.calibration.source

    @cached_property
    def calibration_parameters(self) -> dict[str, float]:
        """Fitted parameters by name, in their own unit; empty before any calibration."""
        return {name: parameter.value for name, parameter in self.calibration.parameters.items()}

    @property
    def is_hypothetical(self) -> bool:
        """True for a GPU that does not exist: a main datasheet value (SMs, clock, SMEM, L2, HBM, tensor) is assumed."""
        datasheet = ("num_sms", "max_clock_hz", "smem_bytes_per_sm", "l2_bytes", "hbm_bandwidth_bytes_per_s")
        tensor = [key for key in self.values if key.startswith("spec_tensor_flops.")]
        return any(self.values[key].kind == "assumed" for key in (*datasheet, *tensor))

    def tensor_rate(self, path: str, dtype: str) -> float:
        """Dense FLOP per cycle and SM of an instruction path (``wgmma``) and input type (``bf16``).

        Raises :class:`UnsupportedError` naming the capability that the GPU lacks.
        """
        if path not in TENSOR_PATHS:
            raise InputError(f"unknown instruction path '{path}'; one of {', '.join(TENSOR_PATHS)}")
        if dtype not in TENSOR_DTYPES:
            raise InputError(f"unknown tensor input type '{dtype}'; one of {', '.join(TENSOR_DTYPES)}")
        if path not in self.capabilities:
            raise UnsupportedError(
                f"{self.name} lacks the capability '{path}'; it has {', '.join(sorted(self.capabilities))}"
            )
        rates = self.tensor_flop_per_cycle_per_sm[path]
        if dtype not in rates:
            lacking = "fp8_tensor" if dtype == "fp8" and "fp8_tensor" not in self.capabilities else f"{path} {dtype}"
            raise UnsupportedError(
                f"{self.name} lacks the capability '{lacking}'; its {path} takes {', '.join(sorted(rates))}"
            )
        return rates[dtype]

    def fastest_tensor_path(self, dtype: str) -> str:
        """The instruction path with the highest rate for ``dtype``; UnsupportedError when none takes it."""
        rates = {path: table[dtype] for path, table in self.tensor_flop_per_cycle_per_sm.items() if dtype in table}
        if not rates:
            raise UnsupportedError(f"{self.name} lacks the capability to multiply {dtype} on its tensor cores")
        return max(rates, key=lambda path: (rates[path], path))

    def spec_flops(self, dtype: str) -> float:
        """Datasheet dense tensor FLOP/s of an input type; UnsupportedError when the datasheet has none."""
        if dtype not in self.spec_tensor_flops:
            raise UnsupportedError(
                f"{self.name} has no datasheet tensor rate for {dtype}; it has "
                f"{', '.join(sorted(self.spec_tensor_flops))}"
            )
        return self.spec_tensor_flops[dtype]

    def ridge_flop_per_byte(self, dtype: str) -> float:
        """Datasheet FLOP/s over datasheet HBM bandwidth: the intensity at which the roofline bends."""
        return self.spec_flops(dtype) / self.hbm_bandwidth_bytes_per_s

    def with_calibration(self, parameters: Mapping[str, float], source: str = "trial") -> "Profile":
        """The same GPU with other fitted parameters (for a fit's inner loop): names -> values, bounds not kept."""
        fitted = {name: CalibrationParameter(value, "", value, value) for name, value in parameters.items()}
        return replace(self, calibration=Calibration(source, FrozenMapping(fitted)))

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        numbers = tuple(sorted((key, quantity.value) for key, quantity in self.values.items()))
        fitted = tuple(sorted(self.calibration_parameters.items()))
        traits = (self.name, self.architecture, self.compute_capability, tuple(sorted(self.capabilities)))
        return (*traits, numbers, fitted)

    def fingerprint(self) -> str:
        """A hex digest of everything that equality compares; the same in every process and Python version."""
        return hashlib.sha256(json.dumps(self._identity).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, Profile) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity)


def profile_folder() -> Path:
    """The folder of the profiles that iosim ships."""
    import hardware_profiles

    return Path(hardware_profiles.__file__).parent


def profile_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    return sorted(path.stem for path in profile_folder().glob("*.yaml"))


def load_profile(name_or_path: str | Path, overrides: Mapping[str, str] | None = None) -> Profile:
    """The profile of a shipped GPU (``"h100_sxm"``) or of a YAML file (``"my_gpu.yaml"``), overrides applied.

    ``overrides`` maps keys to texts as ``--set`` takes them: ``{"l2_bytes": "x2", "hbm_bandwidth": "8TB/s"}``.
    Raises :class:`InputError` (one line, ``file:line: key: what is wrong; what would be right``).
    """
    from simulator.profile_loader import read_profile

    profile = read_profile(name_or_path)
    if overrides:
        from simulator.overrides import apply_overrides

        profile = apply_overrides(profile, overrides)
    return profile


def write_calibration(path: str | Path, section: Mapping[str, Any]) -> None:
    """Replace only the ``calibration:`` section of a profile's file; see ``calibration_section.write_calibration``."""
    from simulator.calibration_section import write_calibration as write

    write(path, section)
