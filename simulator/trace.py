"""Traces in Chrome's trace-event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process a group of tracks: the GPU's SMs (a slice a CTA, named after its tile), the pipes of one SM, its
warpgroups, and the levels of memory with counters of bandwidth. Times are µs from the start of the call.
Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.plots.timeline import PIPE_LANES, ROLE_KINDS

if TYPE_CHECKING:
    import numpy as np

    from simulator.observe import KernelObservation, Observation, SmObservation

Event = dict[str, Any]
#: Shared memory moves through this pipe; it is a memory level's track as well.
_SMEM_PIPE = "smem"
#: Share of a level's peak in a bin from which its track shows a slice.
_IDLE_SHARE = 0.005


def write_trace(path: str | Path, observations: Iterable[Observation], command: str = "") -> None:
    """Write :func:`trace` of ``observations`` to ``path`` as JSON."""
    from simulator.atomic_write import write_text

    write_text(path, json.dumps(trace(observations, command), separators=(",", ":")) + "\n")


def trace(observations: Iterable[Observation], command: str = "") -> dict[str, Any]:
    """``observations`` as one trace object; each algorithm on each GPU has its own processes."""
    events: list[Event] = []
    pid = 0
    described = []
    for seen in observations:
        result = seen.result
        title = f"{result.algorithm} on {result.gpu}"
        described.append(str(result))
        events += _gpu_tracks(pid + 1, f"{title}: CTAs by SM", seen.kernels)
        events += _sm_tracks(pid + 2, title, seen.sm)
        events += _memory_tracks(pid + 4, f"{title}: memory", seen)
        pid += 4
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"made by": "iosim", "command": command, "results": "; ".join(described)},
    }


def _process(pid: int, name: str, about: str = "") -> list[Event]:
    events = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}},
    ]
    if about:
        events.append({"ph": "M", "pid": pid, "name": "process_labels", "args": {"labels": about}})
    return events


def _thread(pid: int, tid: int, name: str) -> list[Event]:
    return [
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}},
    ]


def _slice(pid: int, tid: int, name: str, category: str, start_us: float, end_us: float, args: Event) -> Event:
    # whole nanoseconds, as viewers keep time: rounding start and length apart would make neighbours overlap
    start, end = round(start_us * 1e3), round(end_us * 1e3)
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category, "ts": start / 1e3,
        "dur": (end - start) / 1e3, "args": args,
    }  # fmt: skip


def _gpu_tracks(pid: int, name: str, kernels: tuple[KernelObservation, ...]) -> list[Event]:
    events = _process(pid, name)
    named = set()
    # an SM has a track for each slot that some launch uses
    slots = 1 + max(int(kernel.ctas[:, 0].max()) // kernel.num_sms for kernel in kernels)
    for kernel in kernels:
        for cta, (slot, start, end) in enumerate(kernel.ctas):
            sm, part = int(slot) % kernel.num_sms, int(slot) // kernel.num_sms
            tid = sm * slots + part + 1
            if tid not in named:
                named.add(tid)
                events += _thread(pid, tid, f"SM {sm}" + (f" slot {part}" if slots > 1 else ""))
            label = kernel.labels[cta]
            events.append(
                _slice(pid, tid, label, kernel.name, start, end, {"kernel": kernel.name, "cta": cta, "tile": label})
            )
    return events


def _sm_tracks(pid: int, title: str, sm: SmObservation) -> list[Event]:
    us = 1e6 / sm.clock_hz
    cut = "; later iterations left out" if sm.cut else ""
    about = f"{sm.kernel}, {sm.label}, {sm.residents} resident, {sm.clock_hz / 1e6:.0f} MHz{cut}"
    events = _process(pid, f"{title}: pipes of one SM", about)
    events += _process(pid + 1, f"{title}: warpgroups of one SM", about)
    pipes = [pipe for pipe in (*PIPE_LANES, "port_out") if any(span.track == pipe for span in sm.spans)]
    # warps share a pipe instruction by instruction, so each stream has its own track of it
    lanes = [(p, r) for p in pipes for r in sm.roles if any((s.track, s.role) == (p, r) for s in sm.spans)]
    for tid, (pipe, role) in enumerate(lanes, 1):
        events += _thread(pid, tid, f"{PIPE_LANES.get(pipe, 'stores (SM → L2)')}: {_role_name(role)}")
    for tid, role in enumerate(sm.roles, 1):
        events += _thread(pid + 1, tid, _role_name(role))
    for span in sm.spans:
        start, end = sm.start_us + span.start_cycles * us, sm.start_us + span.end_cycles * us
        cycles = {"start_cycle": round(span.start_cycles, 3), "cycles": round(span.end_cycles - span.start_cycles, 3)}
        if span.track == "role":
            name = ROLE_KINDS.get(span.what, span.what)
            tid = sm.roles.index(span.role) + 1
            events.append(_slice(pid + 1, tid, name, "role", start, end, {"operation": span.what, **cycles}))
        elif span.track in pipes:
            tid = lanes.index((span.track, span.role)) + 1
            name = f"{span.track} {span.role.partition('/')[2]}"
            events.append(_slice(pid, tid, name, "pipe", start, end, {"pipe": span.track, **cycles}))
    return events


def _role_name(role: str) -> str:
    return role.replace("cta", "CTA ").replace("/", ", ")


def _memory_tracks(pid: int, name: str, seen: Observation) -> list[Event]:
    """Counters of bandwidth (GB/s), and a track a level whose slices say how busy it is."""
    events = _process(pid, name)
    sm = seen.sm
    users = [role for role in sm.roles if any((s.track, s.role) == (_SMEM_PIPE, role) for s in sm.spans)]
    shared = [f"shared memory of one SM: {_role_name(role)}" for role in users]
    for tid, level in enumerate(("HBM", "L2", *shared), 1):
        events += _thread(pid, tid, level)
    peaks = [1.0, 1.0]
    for kernel in seen.kernels:
        peaks[0] = max(peaks[0], float((kernel.flow[:, 1] + kernel.flow[:, 2]).max()) / kernel.bin_us)
        peaks[1] = max(peaks[1], float(kernel.flow[:, 0].max()) / kernel.bin_us)
    for kernel in seen.kernels:
        for index, (l2, read, written) in enumerate(kernel.flow):
            start = kernel.start_us + index * kernel.bin_us
            # bytes per µs over 1000 is GB/s
            rates = {
                "HBM read": {"GB/s": round(int(read) / kernel.bin_us / 1e3, 3)},
                "HBM write": {"GB/s": round(int(written) / kernel.bin_us / 1e3, 3)},
                "L2": {"GB/s": round(int(l2) / kernel.bin_us / 1e3, 3)},
            }
            for counter, value in rates.items():
                events.append(
                    {"ph": "C", "pid": pid, "name": f"{counter} bandwidth", "ts": round(start, 3), "args": value}
                )
        events += _busy_slices(pid, 1, kernel, kernel.flow[:, 1] + kernel.flow[:, 2], peaks[0])
        events += _busy_slices(pid, 2, kernel, kernel.flow[:, 0], peaks[1])
        end = round(kernel.start_us + len(kernel.flow) * kernel.bin_us, 3)
        for counter in ("HBM read", "HBM write", "L2"):
            events.append({"ph": "C", "pid": pid, "name": f"{counter} bandwidth", "ts": end, "args": {"GB/s": 0}})
    us = 1e6 / sm.clock_hz
    for span in sm.spans:
        if span.track == _SMEM_PIPE:
            start, end = sm.start_us + span.start_cycles * us, sm.start_us + span.end_cycles * us
            events.append(_slice(pid, 3 + users.index(span.role), "SMEM", "memory", start, end, {}))
    return events


def _busy_slices(pid: int, tid: int, kernel: KernelObservation, moved: np.ndarray, peak: float) -> list[Event]:
    """Stretches of bins in which bytes moved, with their mean rate."""
    events, first = [], None
    for index in range(len(moved) + 1):
        active = index < len(moved) and moved[index] / kernel.bin_us > _IDLE_SHARE * peak
        if active and first is None:
            first = index
        elif not active and first is not None:
            start = kernel.start_us + first * kernel.bin_us
            amount = int(moved[first:index].sum())
            end = kernel.start_us + index * kernel.bin_us
            name = f"{kernel.name}: {amount / (end - start) / 1e3:.0f} GB/s"
            events.append(_slice(pid, tid, name, "memory", start, end, {"bytes": amount, "kernel": kernel.name}))
            first = None
    return events
