"""Results on disk: written once, drawn as often as wanted without simulating again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from simulator.bounded_read import read_at_most
from simulator.errors import InputError
from simulator.problem import AttentionProblem
from simulator.result import KernelResult, Result, TensorTraffic

FORMAT = "iosim results"


def results_json(results: Iterable[Result], command: str = "") -> str:
    """``results`` as JSON text; ``command`` is the command line that made them."""
    data = {"format": FORMAT, "command": command, "results": [plain(result.to_json()) for result in results]}
    return json.dumps(data, indent=1) + "\n"


def plain(data: Any) -> Any:
    """``data`` as JSON has it: no infinities or NaN (null instead), no NumPy numbers, text keys."""
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if hasattr(data, "item"):
        data = data.item()
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data if data is None or isinstance(data, bool | int | float | str) else str(data)


def load_results(path: str | Path) -> list[Result]:
    """Results of a file that ``iosim ... --json`` wrote (``compare``'s too).

    Raises :class:`InputError` naming file, entry and key when it is not such a file.
    """
    path = Path(path)
    try:
        data = json.loads(read_at_most(path).decode("utf-8"))
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a JSON file that iosim wrote") from None
    except (ValueError, RecursionError) as error:
        where = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
        raise InputError(f"{where}: not JSON; name a JSON file that iosim wrote") from None
    entries = data.get("results") if isinstance(data, dict) else data
    if not isinstance(entries, list):
        raise InputError(f"{path}: no list of results in it; name a JSON file that iosim wrote with --json")
    found = []
    for index, entry in enumerate(entries):
        if isinstance(entry, dict) and "result" in entry and not isinstance(entry["result"], str):
            entry = entry["result"]
        if entry is None:
            continue  # an algorithm that could not run
        try:
            found.append(result_from(entry))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"key {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(f"{path}: results[{index}]: {what}: not a result of this version of iosim") from None
    if not found:
        raise InputError(f"{path}: holds no result that ran")
    return found


def result_from(data: Mapping[str, Any]) -> Result:
    """The :class:`Result` of one JSON object; KeyError or TypeError when it is none."""
    problem = dict(data["problem"])
    for name in ("window", "seqlens_q", "seqlens_k"):
        if problem.get(name) is not None:
            problem[name] = tuple(problem[name])
    kernels = []
    for kernel in data["kernels"]:
        traffic = tuple(TensorTraffic(**entry) for entry in kernel["traffic"])
        kernels.append(KernelResult(**(_known(KernelResult, kernel) | {"traffic": traffic})))
    for name in ("warnings", "notes", "substitutions"):
        if not isinstance(data.get(name, []), list):
            raise TypeError(f"{name} is not a list")
    texts = {name: tuple(data.get(name, ())) for name in ("warnings", "notes", "substitutions")}
    known = _known(Result, data) | texts
    for name in ("algorithm", "implementation", "gpu", "limiter"):
        if not isinstance(known.get(name), str):
            raise TypeError(f"{name} is not a text")
    known["problem"] = AttentionProblem(**_known(AttentionProblem, problem))
    known["kernels"] = tuple(kernels)
    return Result(**known)


def _known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in data.items() if name in names}
