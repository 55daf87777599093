"""What a sweep has done so far, on disk: a line of JSON for each finished point, safe against a kill at any time.

Only the process that started the sweep writes. Lines are appended and flushed to the disk together; a line that a
kill cut short is dropped when the journal is opened again, so a point is on record whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from simulator.errors import InputError

VERSION = 1


class Journal:
    """The rows of the finished points of one sweep, by point; a context manager that holds the file's lock.

    ``stale`` is True when other code wrote the earlier rows (the model may have changed since).
    """

    def __init__(self, path: str | Path, fingerprint: str, points: int, restart: bool = False) -> None:
        self.path = Path(path)
        self.rows: dict[int, dict[str, Any]] = {}
        self.stale = False
        self.header = {
            "iosim_sweep": VERSION,
            "fingerprint": fingerprint,
            "points": points,
            "code": code_fingerprint(),
        }
        self._file = _opened(self.path)
        try:
            self._lock()
            if restart:
                self._file.truncate(0)
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, which gives its lock back."""
        self._file.close()

    def append(self, rows: Iterable[dict[str, Any]]) -> int:
        """Put rows on record; those of points that are on record already are left out. Returns how many were new."""
        new = {row["point"]: row for row in rows if row["point"] not in self.rows}
        self._write("".join(_line(row) for row in new.values()))
        self.rows |= new
        return len(new)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{self.path}: another sweep is writing it; wait for it, or name another --output"
            raise InputError(message) from None

    def _write(self, text: str) -> None:
        if not text:
            return
        try:
            self._file.write(text.encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror}); free space and run again") from error

    def _read(self) -> None:
        """Take over what an earlier run left, up to the first line that is not whole."""
        self._file.seek(0)
        good, header = 0, None
        for line in self._file:
            data = _parsed(line)
            if data is None:
                break
            if header is None:
                header = data
                self._check(header)
            else:
                self.rows[data["point"]] = data
            good += len(line)
        self._file.truncate(good)
        self._file.seek(good)
        if header is None:
            self._write(_line(self.header))

    def _check(self, header: dict[str, Any]) -> None:
        if header.get("iosim_sweep") != VERSION:
            raise InputError(f"{self.path}:1: not a sweep's journal; name another --output, or remove this file")
        if header["fingerprint"] != self.header["fingerprint"]:
            raise InputError(
                f"{self.path}: holds another sweep (other points, GPUs or settings); "
                "give --restart to start over, or name another --output"
            )
        self.stale = header.get("code") != self.header["code"]


def _opened(path: Path) -> IO[bytes]:
    try:
        # never truncated by opening: two processes may open it, only one gets the lock
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); name a file in a writable folder") from error


def _line(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":")) + "\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A whole line's data; ``None`` for one that was cut short."""
    if not line.endswith(b"\n"):
        return None
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) and ("point" in data or "iosim_sweep" in data) else None


def code_fingerprint() -> str:
    """A digest of iosim's own source: rows of one sweep should come from one model."""
    import algorithms
    import simulator

    digest = hashlib.sha256()
    for package in (simulator, algorithms):
        for path in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
