"""The one exception a user's mistake raises; everything else is a bug."""


class InputError(ValueError):
    """Bad input: the message is one line that says what is wrong, where, and what would be right.

    The command line prints the message and exits with code 2, without a traceback.
    """


class UnsupportedError(InputError):
    """A valid question that the model does not answer (a capability or a feature that is not modelled).

    ``predict`` turns it into the row's ``error`` column.
    """
