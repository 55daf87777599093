"""The command ``iosim``: a table of commands whose modules are imported when they are called.

A command's module has ``register(app)``, which adds one or more commands to a Typer app. To add a command,
write such a module and a line of :data:`COMMANDS`.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

# ruff: noqa: E402 -- until :func:`main` can say so in one line, an interrupt ends the process without a traceback, also
# during the imports below
_OWN_PROCESS = __name__ == "__main__" or os.path.basename(sys.argv[0]) == "iosim"
if _OWN_PROCESS and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from simulator.errors import InputError, did_you_mean

#: (command, module that registers it, what ``iosim --help`` says of it). The help never imports the modules.
COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("compare", "simulator.compare_command", "Compare attention algorithms on GPUs: bytes, time, limiter."),
    ("why", "simulator.why_command", "Why one algorithm is faster than another, in computed numbers."),
    ("dispatch", "simulator.dispatch_command", "Which kernel a framework really runs, and why not another."),
    ("explain", "simulator.explain_command", "What a measured time says: possible, expected, or caused by what."),
    ("predict", "simulator.predict_command", "Predict every row of a CSV file."),
    ("gpus", "simulator.gpus_command", "List GPUs, show one with its sources, compare two."),
    ("io", "simulator.plot_commands", "Bytes by tensor and level of memory; against N, SRAM, L2."),
    ("timeline", "simulator.plot_commands", "Who waits for what: pipes of an SM, CTAs of the GPU, traces."),
    ("roofline", "simulator.plot_commands", "Hierarchical roofline of the algorithms on GPUs."),
    ("scale", "simulator.plot_commands", "Time and memory against sequence length."),
    ("report", "simulator.report.command", "One interactive HTML page of a comparison."),
    ("model", "simulator.model_command", "Attention inside whole models: training, prefill, decode."),
    ("sweep", "simulator.sweep_command", "Simulate a design space of hardware and problems."),
    ("sensitivity", "simulator.sensitivity_command", "What 1 % more of each hardware parameter buys."),
    ("require", "simulator.require_command", "The least hardware that reaches a target."),
    ("measure", "simulator.measure.command", "Measure attention kernels on the GPU of this machine."),
    ("calibrate", "simulator.calibrate_command", "Fit a GPU's physical parameters to measurements."),
    ("validate", "simulator.validate_command", "Predicted against measured, by algorithm and regime."),
)


#: What a full disk or a broken device behind stdout says.
_CANNOT_TAKE_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
#: A longer message quotes a file's own words at length: its middle is left out.
_MOST_LETTERS = 2000


class CommandTable(TyperGroup):
    """The commands of :data:`COMMANDS`, each imported when it is called."""

    _showing_help = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the table, without modules that this installation lacks."""
        return [name for name, module, _ in COMMANDS if _exists(module)]

    def get_command(self, ctx: Any, name: str) -> Any:
        """The command ``name``, or None; a stand-in with its one-line help while the table is being shown."""
        for known, module, about in COMMANDS:
            if known == name and _exists(module):
                return TyperCommand(name, help=about) if self._showing_help else _load(module, name)
        return None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the table without importing the commands."""
        self._showing_help = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._showing_help = False


def _exists(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return find_spec(parent) is not None and find_spec(module) is not None


def _load(module: str, name: str) -> Any:
    part = typer.Typer()
    import_module(module).register(part)
    return typer.main.get_group(part).commands[name]


app = typer.Typer(cls=CommandTable, no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed_version

        try:
            print(f"iosim {installed_version('iosim')}")
        except PackageNotFoundError:
            print("iosim, run from a checkout that is not installed")
        raise typer.Exit()


@app.callback()
def iosim(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """How many bytes an attention algorithm moves on a GPU, how long it takes and what it waits for."""


def main(arguments: list[str] | None = None) -> int:
    """Run ``iosim``; the exit code. A user's mistake is one line on stderr and code 2."""
    if _OWN_PROCESS and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # closed by the caller (>&-): nobody reads it; open as long as the process lives
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
            # a file's name may hold bytes that are no text: shown, not a reason to fail after the work
            stream.reconfigure(errors="backslashreplace")
    if not sys.stdout.isatty():
        # a file or a pipe has no width: rich would take 80 columns and cut tables off there
        os.environ.setdefault("COLUMNS", "140")
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="iosim", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except InputError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # the reader of a pipe (head, less) has gone: not an error, and nothing more can be printed
        _drop_output()
        return 0
    except OSError as error:
        if error.errno not in _CANNOT_TAKE_OUTPUT or error.filename is not None:
            raise
        _drop_output()
        return _fail(f"the output cannot be written ({error.strerror}); send it to another place")
    except (KeyboardInterrupt, typer.Abort):
        print("iosim: interrupted", file=sys.stderr)
        return 130
    except MemoryError:
        return _fail("the memory of this machine is used up; ask for fewer sequences, heads, queries or points")
    except Exception as error:
        # Typer carries click's exceptions under changing import paths: known by what they can do
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            return _help_without_arguments(error)
        where = getattr(getattr(error, "ctx", None), "command_path", "iosim")
        said = error.format_message()
        if said.startswith("No such command"):
            hint = did_you_mean(said.split("'")[1], [name for name, _, _ in COMMANDS])
            said = f"{said} {hint}".rstrip()
        return _fail(f"{said} (see '{where} --help')")


def _drop_output() -> None:
    """What is left in stdout's buffer goes nowhere: Python would try to write it once more at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help_without_arguments(error: Any) -> int:
    text = error.format_message()
    if text:
        print(text)
    return 2


def _fail(message: str) -> int:
    text = " ".join(message.split())
    if len(text) > _MOST_LETTERS:
        half = _MOST_LETTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    # a file's own words are quoted in messages: they must not steer the terminal
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    print(f"iosim: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
