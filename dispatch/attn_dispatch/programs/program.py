"""The program of a score_mod or mask_mod: its computation for one pair of a query and a key."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

INDICES = ("b", "n", "t", "s")
"""Batch row, head, and the positions of query and key inside their sequences; int32 scalars."""

_MAY_BE_NAN = {
    "div", "log", "log1p", "pow", "integer_pow", "sqrt", "rsqrt", "tan", "exp", "exp2", "expm1",
    "erf_inv", "acos", "asin", "acosh", "atanh", "lgamma", "digamma", "scan", "while", "cond",
}  # fmt: skip


@dataclass(frozen=True)
class ModProgram:
    """A traced function of scalars. Two are equal if they perform the same operations.

    Its inputs are the score (score_mod only); b, n, t, s; and, whole, the arrays that it was given
    or captured.
    """

    text: str
    """Every operation, and those of its derivative if it defines one, without names or addresses.
    Equality, hashes and JAX's caches compare this text."""
    arrays: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype name of each array."""
    jaxpr: ClosedJaxpr = field(compare=False, repr=False)
    """The user's function as traced, with its custom derivatives."""
    body: ClosedJaxpr = field(compare=False, repr=False)
    """`jaxpr` in plain operations, without calls and without operations that have no effect."""

    def __str__(self) -> str:
        return " ".join(str(self.body.jaxpr).split())


def is_finite(program: ModProgram | None) -> bool:
    """Whether finite inputs surely give finite results, judged by the operations."""
    return program is None or not any(map(_may_be_nan, program.body.jaxpr.eqns))


def _may_be_nan(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    if name == "div" and isinstance(equation.invars[1], Literal):
        return not equation.invars[1].val
    if name == "integer_pow" and equation.params["y"] >= 0:
        return False
    return name in _MAY_BE_NAN


@lru_cache(maxsize=1024)
def axes_of(program: ModProgram) -> str:
    """The letters of "bnts" that the result depends on."""
    depends = dependence(program)
    out = program.body.jaxpr.outvars[0]
    return "".join(x for x in INDICES if isinstance(out, Var) and x in depends[out])


def reads_by_key(program: ModProgram) -> bool:
    """Whether an array is indexed by something that depends on s."""
    depends = dependence(program)
    return any(
        equation.primitive.name in ("gather", "dynamic_slice")
        and any(isinstance(x, Var) and "s" in depends[x] for x in equation.invars)
        for equation in program.body.jaxpr.eqns
    )


def dependence(program: ModProgram) -> dict[Var, frozenset[str]]:
    """For each value of the body, which of "score", b, n, t and s it depends on."""
    jaxpr = program.body.jaxpr
    takes_score = len(jaxpr.invars) > len(INDICES) + len(program.arrays)
    names = [*(["score"] if takes_score else []), *INDICES, *("" for _ in program.arrays)]
    depends = {x: frozenset({name} - {""}) for x, name in zip(jaxpr.invars, names, strict=True)}
    for equation in jaxpr.eqns:
        of = frozenset[str]().union(*(depends[x] for x in equation.invars if isinstance(x, Var)))
        depends |= dict.fromkeys(equation.outvars, of)
    return depends
