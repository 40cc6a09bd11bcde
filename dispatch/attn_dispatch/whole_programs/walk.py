"""A walk through a traced program: each operation, how often it runs, and facts about its operands.

The walk enters everything that JAX calls or repeats (jit, scan, while, cond, remat, shard_map,
custom derivatives). Facts follow the values: what a rule says of an operation's results, it is
given again as facts about the operands of the operations that use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from attn_dispatch.core.jax_compat import is_recomputed
from attn_dispatch.whole_programs.runs import Branch, Runs

Fact = TypeVar("Fact")

_ONCE = Runs()


Rule = Callable[[JaxprEqn, Sequence[Fact | None], Runs], Sequence[Fact | None]]
"""Takes an operation, the fact about each operand, and how often it runs; returns the fact about
each result. None is no fact."""


def walk(jaxpr: Jaxpr, rule: Rule[Fact], runs: Runs = _ONCE) -> None:
    """Give the rule every operation of a program, in order."""
    _walk(jaxpr, [None for _ in jaxpr.invars], rule, runs)


def _walk(
    jaxpr: Jaxpr, inputs: Sequence[Fact | None], rule: Rule[Fact], runs: Runs
) -> list[Fact | None]:
    facts: dict[Var, Fact] = {}

    def know(variables: Sequence[Var], found: Sequence[Fact | None]) -> None:
        facts.update(
            (x, fact) for x, fact in zip(variables, found, strict=True) if fact is not None
        )

    def known(values: Sequence[Var | Literal]) -> list[Fact | None]:
        return [facts.get(x) if isinstance(x, Var) else None for x in values]

    know(jaxpr.invars, inputs)
    for equation in jaxpr.eqns:
        given = known(equation.invars)
        its_runs = runs.recomputed() if is_recomputed(equation) else runs
        if inner := list(bodies(equation, its_runs)):
            know(equation.outvars, _of_bodies(equation, inner, given, rule))
        else:
            know(equation.outvars, rule(equation, given, its_runs))
    return known(jaxpr.outvars)


@dataclass(frozen=True)
class Body:
    """A program within an operation."""

    jaxpr: Jaxpr
    runs: Runs
    operands: Sequence[int]
    """Which of the operation's operands are its inputs."""


def _of_bodies(
    equation: JaxprEqn, inner: Sequence[Body], given: Sequence[Fact | None], rule: Rule[Fact]
) -> list[Fact | None]:
    """The facts about the results of an operation with bodies: those that any body has."""
    results: list[Fact | None] = [None for _ in equation.outvars]
    for body in inner:
        inputs: list[Fact | None] = [None for _ in body.jaxpr.invars]
        if len(body.operands) == len(inputs):
            inputs = [given[i] for i in body.operands]
        found = _walk(body.jaxpr, inputs, rule, body.runs)
        if len(found) == len(results):
            results = [x if x is not None else y for x, y in zip(results, found, strict=True)]
    return results


def bodies(equation: JaxprEqn, runs: Runs = _ONCE) -> Iterator[Body]:
    """The programs within an operation, and how often each runs if the operation runs so often."""
    name, params = equation.primitive.name, equation.params
    every = range(len(equation.invars))
    if name == "scan":
        length = cast("int", params["length"])
        yield Body(_open(params["jaxpr"]), runs.repeated(length), every)
    elif name == "while":
        ours = cast("int", params["cond_nconsts"])
        carried = ours + cast("int", params["body_nconsts"])
        again = runs.repeated(None)
        yield Body(_open(params["cond_jaxpr"]), again, [*every[:ours], *every[carried:]])
        yield Body(_open(params["body_jaxpr"]), again, every[ours:])
    elif name == "cond":
        choice, branches = object(), cast("Sequence[object]", params["branches"])
        for i, branch in enumerate(branches):
            inside = runs.in_branch(Branch(choice, i, len(branches)))
            yield Body(_open(branch), inside, every[1:])
    elif name not in _KERNELS:
        for value in params.values():
            if name.startswith("call_hi_primitive"):  # of jax.checkpoint under jax_remat3
                value = cast("object", getattr(value, "jaxpr", None))
            if isinstance(value, ClosedJaxpr | Jaxpr):
                yield Body(_open(value), runs, every)


_KERNELS = ("pallas_call",)
"""Operations whose body is a kernel: one operation for the program."""


def _open(jaxpr: object) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else cast("Jaxpr", jaxpr)
