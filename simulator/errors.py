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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean 'fa2'? `` (with the space) where one of ``known`` is close to ``word``, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'? " if close else ""
