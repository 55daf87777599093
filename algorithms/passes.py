"""Forward and backward passes of one call as one program."""

from __future__ import annotations

from collections.abc import Callable

from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.program import Program


def build_passes(
    problem: AttentionProblem,
    forward: Callable[[AttentionProblem], Program],
    backward: Callable[[AttentionProblem], Program],
    forward_of_both: Callable[[AttentionProblem], Program] | None = None,
) -> Program:
    """The program of the pass that ``problem`` asks for.

    ``forward_of_both`` builds the forward pass of a joint call where it differs from one that stands alone, because
    it keeps more or lays tensors out as the backward pass wants them.
    """
    if problem.pass_ == "fwd":
        return forward(problem)
    if problem.pass_ == "bwd":
        return backward(problem)
    return forward_backward(problem, forward_of_both or forward, backward)


def forward_backward(
    problem: AttentionProblem,
    forward: Callable[[AttentionProblem], Program],
    backward: Callable[[AttentionProblem], Program],
) -> Program:
    """The kernels of both passes in order; ``forward`` and ``backward`` build each for its own pass.

    Peak memory is the larger of the passes': a backward pass holds what the forward one kept. The two passes must lay
    tensors out alike (no packing of query heads into rows), else :class:`UnsupportedError`.
    """
    first, second = forward(problem.with_(pass_="fwd")), backward(problem.with_(pass_="bwd"))
    before, after = first.tensors(), second.tensors()
    for name in before.keys() & after.keys():
        a, b = before[name], after[name]
        if (a.heads, a.rows, a.cols, a.dtype, a.packed_group) != (b.heads, b.rows, b.cols, b.dtype, b.packed_group):
            raise UnsupportedError(f"pass fwd_bwd: the passes of {second.implementation} lay {name} out differently")
    # fused kernels leave O and LSE for their backward pass, unfused ones P
    kept = [first.outputs[name] for name in second.inputs if name in first.outputs]
    # what backward reads and forward made is no input of the call
    inputs = {**first.inputs, **{k: t for k, t in second.inputs.items() if k not in first.outputs}}
    return Program(
        second.algorithm,
        second.implementation,
        problem,
        (*first.kernels, *second.kernels),
        inputs,
        {**first.outputs, **second.outputs},
        max(first.live_bytes, second.live_bytes),
        notes=tuple(dict.fromkeys((*first.notes, *second.notes))),
        substitutions=tuple(dict.fromkeys((*first.substitutions, *second.substitutions))),
        warnings=tuple(dict.fromkeys((*first.warnings, *second.warnings))),
        attributes={
            **first.attributes,
            **second.attributes,
            "kept_bytes": sum(t.bytes for t in kept),
            "kept": tuple(t.name for t in kept),
        },
    )
