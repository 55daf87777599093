"""``iosim dispatch``: which kernel a framework really runs, why not the others, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.errors import InputError
from simulator.options import RunOptions, takes_problem
from simulator.problem import AttentionProblem
from simulator.tables import print_labelled, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from simulator.dispatch.decide import Decision
    from simulator.dispatch.timing import Timed
    from simulator.profile import Profile


def register(app: typer.Typer) -> None:
    """Add the ``dispatch`` command to ``app``."""
    app.command("dispatch")(dispatch)


@takes_problem()
def dispatch(
    *,
    problem: AttentionProblem,
    conditions: RunOptions,
    gpu: Annotated[str, typer.Option("--gpu", help="A name of 'iosim gpus' or a YAML file.")] = "h200_sxm",
    framework: Annotated[
        str, typer.Option("--framework", help="torch, flash-attn, vllm, tensorrt-llm, or one of --rules.")
    ] = "torch",
    version: Annotated[
        str | None, typer.Option("--version", help="Its version (default: see --list).", metavar="VERSION")
    ] = None,
    training: Annotated[bool, typer.Option("--training", help="Inputs need gradients (as --pass fwd_bwd).")] = False,
    gqa: Annotated[
        int | None, typer.Option("--gqa", min=1, help="Query heads that share a KV head (instead of --kv-heads).")
    ] = None,
    fact: Annotated[
        list[str] | None,
        typer.Option("--fact", metavar="NAME=VALUE", help="Another fact of the call (see --facts; repeatable)."),
    ] = None,
    hoped: Annotated[
        str | None, typer.Option("--hoped", help="The algorithm to compare with (default: the fastest on this GPU).")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FOLDER", help="Rule files of your own, besides those shipped.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the frameworks and versions that have rules.")] = False,
    facts_: Annotated[bool, typer.Option("--facts", help="List the facts that the framework's rules read.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything.")] = None,
) -> None:
    """Tell which attention kernel a framework runs for a call, the rules that others fail, and the time it costs.

    The rules are data (simulator/dispatch/rules); those of torch 2.11 were compared with PyTorch on an H200.
    """
    from rich.console import Console

    from simulator.dispatch.rule_files import find_rules
    from simulator.dispatch.timing import FrameworkCall, time_of_chosen, time_of_hoped

    console = Console()
    if list_:
        return print_rule_bases(console, rules)
    base, about_version = find_rules(framework, version, rules)
    if facts_:
        return print_facts(console, base)
    profile = conditions.profile(gpu)
    problem = _with_shortcuts(problem, training, gqa)
    decision = FrameworkCall(base, tuple(fact or ())).decide(problem, profile)
    runs = time_of_chosen(decision, problem, profile, conditions)
    hope = time_of_hoped(hoped, problem, profile, conditions)
    if json_file is not None:
        from simulator.atomic_write import write_json

        write_json(json_file, decision_data(decision, runs, hope))
    print_decision(console, decision, problem, profile, about_version)
    print_times(console, decision, runs, hope)


def _with_shortcuts(problem: AttentionProblem, training: bool, gqa: int | None) -> AttentionProblem:
    if training and problem.pass_ == "fwd":
        problem = problem.with_(pass_="fwd_bwd")
    if gqa is not None:
        if problem.kv_heads != problem.heads:
            raise InputError("--gqa: --kv-heads says the same; give one of them")
        if problem.heads % gqa:
            raise InputError(f"--gqa: {problem.heads} heads are no multiple of {gqa}; give a divisor of --heads")
        problem = problem.with_(kv_heads=problem.heads // gqa)
    return problem


def print_decision(
    console: Console, decision: Decision, problem: AttentionProblem, profile: Profile, about_version: str = ""
) -> None:
    """What runs, what was refused by which rule, how silent it was, and the traps."""
    from simulator.wording import problem_text

    base, chosen = decision.base, decision.chosen
    _line(console, "Call", problem_text(problem))
    capability = f"compute capability {profile.compute_capability}"
    _line(console, "On", f"{profile.name} ({capability}), {base.title}, {base.version}")
    if about_version:
        _line(console, "Version", about_version, "yellow")
    _line(console, "Runs", f"{chosen.name}: {chosen.title}" if chosen else f"nothing. {base.none_left}", "bold")
    _line(console, "Order", f"{', '.join(decision.order.backends)}: {decision.why_order}")
    for name in decision.rejected:
        for failure in decision.failures[name]:
            _line(console, f"Not {name}", f"{failure.message} [{failure.rule}; {failure.source}]")
    for name in decision.untried:
        failures = decision.failures[name]
        assert chosen is not None
        state = f"could not run: {failures[0].message}" if failures else "could run too"
        _line(console, f"Not {name}", f"comes after {chosen.name}; {state}")
    if decision.rejected or chosen is None:
        _line(console, "Fallback", f"{base.fallback}. {base.silence}")
    _line(console, "To see it", base.how_to_see)
    _line(console, "To force it", base.how_to_force)
    for trap in decision.traps:
        _line(console, "Beware", f"{trap.message} [{trap.source}]", "yellow")


def print_times(console: Console, decision: Decision, runs: Timed, hoped: Timed) -> None:
    """The predicted times, one below the other, and their ratio."""
    from simulator.wording import three_digits, time_text

    for title, timed in (("Time", runs), ("Hoped for", hoped)):
        if timed.result is None:
            _line(console, title, f"{timed.kernel}: {timed.note}" if timed.kernel else timed.note)
            continue
        result = timed.result
        words = " ".join(filter(None, (timed.kernel, timed.words)))
        note = f"; {timed.note}" if timed.note else ""
        kind = "at least " if timed.kind == "at_least" else ""
        _line(console, title, f"{kind}{time_text(result.time_us)}, limited by {result.limiter} ({words}{note})")
    if runs.result is not None and hoped.result is not None and runs.kernel != hoped.kernel:
        ratio = runs.result.time_us / hoped.result.time_us
        least = "at least " if runs.kind == "at_least" else ""
        _line(console, "Costs", f"{least}{three_digits(ratio)} times what was hoped for", "bold")


def _line(console: Console, title: str, text: str, style: str = "") -> None:
    print_labelled(console, title, text, style, label_width=20)


def print_rule_bases(console: Console, folder: Path | None) -> None:
    """Every rule base: framework, version, whether it is the default, rules, source."""
    from rich.markup import escape

    from simulator.dispatch.rule_files import find_rules, rule_bases

    rows = []
    for base in rule_bases(folder):
        default = "default" if find_rules(base.framework, None, folder)[0] is base else ""
        number = sum(len(backend.rules) for backend in base.backends.values())
        rows.append((base.framework, base.version, default, str(number), escape(base.source)))
    headings = ("framework", "version", "", "rules", "source")
    print_table(console, headings, rows, left=("version", ""), prose=("source",))


def print_facts(console: Console, base: Any) -> None:
    """The facts that ``--fact`` takes for a rule base: kind, default, meaning."""
    from rich.markup import escape

    from simulator.dispatch.facts import known_facts, value_text

    rows = []
    for name, known in known_facts(base.settings).items():
        setting = base.settings.get(name)
        default = "of the call" if setting is None else f"as {setting.follows}" if setting.follows else ""
        rows.append((name, known.kind, escape(default or value_text(known.kind, setting.default)), escape(known.about)))
    print_table(console, ("fact", "kind", "default", "meaning"), rows, left=("kind", "default"), prose=("meaning",))


def decision_data(decision: Decision, runs: Timed, hoped: Timed) -> dict[str, Any]:
    """Everything that the command prints, as JSON-ready data."""

    def timed(one: Timed) -> dict[str, Any]:
        time_us = one.result.time_us if one.result else None
        return {"kernel": one.kernel, "kind": one.kind, "time_us": time_us, "note": one.note}

    def failures(found: Iterable[Any]) -> list[dict[str, str]]:
        return [{"rule": one.rule, "message": one.message, "source": one.source} for one in found]

    base = decision.base
    return {
        "framework": base.framework,
        "version": base.version,
        "runs": decision.chosen.name if decision.chosen else None,
        "order": list(decision.order.backends),
        "failed_rules": {name: failures(found) for name, found in decision.failures.items()},
        "fallback": base.fallback,
        "silence": base.silence,
        "how_to_see": base.how_to_see,
        "how_to_force": base.how_to_force,
        "traps": failures(decision.traps),
        "facts": {k: sorted(v) if isinstance(v, frozenset) else v for k, v in decision.facts.items()},
        "time": timed(runs),
        "hoped_for": timed(hoped),
    }
