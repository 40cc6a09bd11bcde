"""What a score_mod or a mask_mod computes of one pair of a query and a key."""

from __future__ import annotations

from dataclasses import dataclass, field

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

INDICES = ("b", "n", "t", "s")
"""Batch row, head, and the positions of query and key inside their sequences; int32 scalars."""

_MAY_BE_NAN = {
    "div", "log", "log1p", "pow", "integer_pow", "sqrt", "rsqrt", "tan", "exp", "exp2", "expm1",
    "erf_inv", "acos", "asin", "acosh", "atanh", "lgamma", "digamma", "scan", "while", "cond",
}  # fmt: skip


@dataclass(frozen=True)
class ModProgram:
    """A function of scalars, traced. Two are equal where they compute the same in the same way.

    Its inputs: of a score_mod first the score; then b, n, t, s; then the arrays that it was given
    or has captured, whole.
    """

    text: str
    """Every operation of it, and of its derivative if it has one, without names or addresses: what
    equality, hashes and JAX's caches go by."""
    arrays: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype name of each array."""
    jaxpr: ClosedJaxpr = field(compare=False, repr=False)
    """As the user's function was traced, its own derivative rules among it."""
    body: ClosedJaxpr = field(compare=False, repr=False)
    """The same in plain operations, without calls and what has no effect on the result."""

    def __str__(self) -> str:
        return " ".join(str(self.body.jaxpr).split())


def is_finite(program: ModProgram | None) -> bool:
    """Whether it makes finite numbers of finite ones, as far as its operations tell."""
    return program is None or not any(map(_may_be_nan, program.body.jaxpr.eqns))


def _may_be_nan(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    if name == "div" and isinstance(equation.invars[1], Literal):
        return not equation.invars[1].val
    if name == "integer_pow" and equation.params["y"] >= 0:
        return False
    return name in _MAY_BE_NAN


def axes_of(program: ModProgram) -> str:
    """Of "bnts" those that the result depends on."""
    depends = dependence(program)
    out = program.body.jaxpr.outvars[0]
    return "".join(x for x in INDICES if isinstance(out, Var) and x in depends[out])


def reads_by_key(program: ModProgram) -> bool:
    """Whether an array is read at a place that depends on s."""
    depends = dependence(program)
    return any(
        equation.primitive.name in ("gather", "dynamic_slice")
        and any(isinstance(x, Var) and "s" in depends[x] for x in equation.invars)
        for equation in program.body.jaxpr.eqns
    )


def dependence(program: ModProgram) -> dict[Var, frozenset[str]]:
    """Which of score, b, n, t and s each value of a body depends on."""
    jaxpr = program.body.jaxpr
    takes_score = len(jaxpr.invars) > len(INDICES) + len(program.arrays)
    names = [*(["score"] if takes_score else []), *INDICES, *("" for _ in program.arrays)]
    depends = {x: frozenset({name} - {""}) for x, name in zip(jaxpr.invars, names, strict=True)}
    for equation in jaxpr.eqns:
        of = frozenset[str]().union(*(depends[x] for x in equation.invars if isinstance(x, Var)))
        depends |= dict.fromkeys(equation.outvars, of)
    return depends
