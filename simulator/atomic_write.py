"""Files that a user asked for: complete or not there at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from simulator.errors import InputError


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` (UTF-8) through a temporary file beside it and a rename.

    :class:`InputError` when the place cannot be written; an earlier file is then left as it was.
    """
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline=""))


def replace_file(path: str | Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` produce a temporary file (same suffix, same folder) and rename it to ``path``."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist; create it first")
    if path.exists() and not path.is_file():
        # a device or a pipe (/dev/stdout) is written to: renaming a file onto it would remove it
        _copy_into(path, write)
        return
    # a link stays one, and what it points to is replaced (a link to itself by the file)
    path = Path(os.path.realpath(path))
    temporary = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        # mkstemp makes files that only their owner reads; a result is an ordinary file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); name a file in a writable folder") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_json(path: str | Path, data: object) -> None:
    """Write ``data`` as readable JSON to ``path`` at once."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def _copy_into(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` produce a temporary file elsewhere and copy its bytes into ``path``."""
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder, f"output{path.suffix}")
        write(temporary)
        try:
            with path.open("wb") as stream:
                stream.write(temporary.read_bytes())
        except BrokenPipeError:
            raise
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}); name a file") from error
