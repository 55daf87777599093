"""The one exception a user's mistake raises; everything else is a bug."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input: the message is one line that says what is wrong, where, and what would be right.

    The command line prints the message and exits with code 2, without a traceback.
    """


class UnsupportedError(InputError):
    """A valid question that the model does not answer (a capability or a feature that is not modelled).

    ``predict`` turns it into the row's ``error`` column.
    """


def file_reason(error: OSError | ValueError) -> str:
    """Why a file could not be opened, in a few words (a path with a zero byte is a ValueError)."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def closest(word: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that ``word`` was probably meant to be: by spelling, whatever the case, by its beginning
    (``h200`` for ``h200_sxm``) or as its short form (``bwd`` for ``backward``, ``fa2`` for ``flash_attention_2``)."""
    plain = {name.lower().replace("-", "_"): name for name in known}
    wanted = word.lower().replace("-", "_")
    begun = [name for name in plain if len(wanted) > 2 and name.startswith(wanted)]
    close = difflib.get_close_matches(wanted, begun or plain, n=1, cutoff=0.0 if begun else 0.6)
    if not close:
        close = [name for name in plain if len(name) > 2 and name[0] == wanted[:1] and _is_short_for(name, wanted)]
    return plain[close[0]] if close else None


def _is_short_for(short: str, word: str) -> bool:
    letters = iter(word)
    return all(letter in letters for letter in short)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean 'fa2'? `` (with the space) where one of ``known`` is close to ``word``, else nothing."""
    found = closest(word, known)
    return f"did you mean '{found}'? " if found else ""


def unknown(what: str, value: str, known: Iterable[str]) -> InputError:
    """The error of a ``value`` that is none of ``known``; ``what`` is the option or column that it was given for."""
    names = list(known)
    return InputError(f"{what}: {value!r} is unknown; {did_you_mean(value, names)}use {', '.join(names)}")
