"""``iosim why``: one algorithm against another, explained in computed numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from simulator.errors import InputError
from simulator.options import RunOptions, takes_problem
from simulator.problem import AttentionProblem
from simulator.tables import print_table

if TYPE_CHECKING:
    from rich.console import Console

    from simulator.explanation import Explanation


def register(app: typer.Typer) -> None:
    """Add the ``why`` command to ``app``."""
    app.command("why")(why)


@takes_problem()
def why(
    *,
    problem: AttentionProblem,
    conditions: RunOptions,
    first: Annotated[str, typer.Argument(metavar="ALGORITHM", help="The one to explain, such as fa1.")],
    second: Annotated[str, typer.Argument(metavar="AGAINST", help="The one to compare it with, such as standard.")],
    gpu: Annotated[str, typer.Option("--gpu", help="A name of 'iosim gpus' or a YAML file.")] = "a100_sxm4_80gb",
    hypothetical: Annotated[
        bool, typer.Option("--hypothetical", help="Also simulate what the GPU lacks the capability for.")
    ] = False,
) -> None:
    """Explain why one algorithm is faster than another: work, bytes, intensity, limiter, and where the time went.

    Both run the same problem; with flash_decoding among them, its decode step (one query token, the same keys).
    """
    from rich.console import Console

    from simulator import simulate
    from simulator.comparison import decode_problem, parse_algorithm
    from simulator.explanation import explain
    from simulator.wording import problem_text

    if first == second:
        raise InputError(f"why: {first!r} against itself; name two algorithms, or two kernels as in fa1:flash_attn_1")
    profile = conditions.profile(gpu)
    asked = [parse_algorithm(name) for name in (first, second)]
    if any(algorithm == "flash_decoding" for algorithm, _ in asked):
        problem = decode_problem(problem)
    results = [
        simulate(
            algorithm,
            problem,
            profile,
            implementation=implementation,
            hypothetical=hypothetical,
            **conditions.arguments(),
        )
        for algorithm, implementation in asked
    ]
    console = Console()
    console.print(f"[bold]Problem[/]: {problem_text(problem)}", highlight=False)
    print_explanation(console, explain(results[0], results[1], profile, (first, second)))


def print_explanation(console: Console, explanation: Explanation) -> None:
    """The sentences, then the numbers behind them."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Text(explanation.headline, style="bold"))
    for result in explanation.results:
        for line in (*result.substitutions, *result.warnings):
            console.print(Text(f"{result.algorithm}: {line}", style="yellow"))
    console.print()
    for topic, sentence in explanation.sentences.items():
        console.print(Padding(Text.assemble((f"{topic}: ", "bold"), sentence), (0, 0, 0, 1)))
    a, b = explanation.names
    print_table(console, ("", a, b), explanation.rows)
    from simulator.wording import scaled, time_text

    times = [(cause, time_text(x), time_text(y)) for cause, x, y in explanation.causes]
    print_table(console, ("time by cause", a, b), times)
    tensors = [(name, scaled(x, "B"), scaled(y, "B")) for name, x, y in explanation.tensors]
    print_table(console, ("HBM bytes by tensor", a, b), tensors)
    kernels = [
        (f"{result.algorithm}: {kernel.name}", time_text(kernel.time_us), kernel.limiter)
        for result in explanation.results
        for kernel in result.kernels
    ]
    print_table(console, ("kernel", "time", "limiter"), kernels)
