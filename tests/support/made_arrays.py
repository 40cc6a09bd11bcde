"""Where a program makes arrays by core/made_once.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax

KEEPS: dict[str, Callable[..., Any]] = {
    "no remat": lambda f: f,
    "remat": jax.checkpoint,
    "remat, of dots": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    ),
    "remat twice": lambda f: jax.checkpoint(lambda *x: jax.checkpoint(f)(*x)),
}  # fmt: skip
"""What a layer's forward pass keeps."""


def equations(jaxpr: Any, is_in_loop: bool = False) -> Iterator[tuple[Any, bool]]:
    """The equations of a program and its parts, and whether they are inside a loop."""
    for equation in jaxpr.eqns:
        yield equation, is_in_loop
        inside = is_in_loop or equation.primitive.name in ("scan", "while")
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                    yield from equations(getattr(part, "jaxpr", part), inside)


def places(function: Callable[..., Any], *arrays: Any) -> Counter[tuple[str, bool]]:
    """How often each kind of maker makes arrays, and whether inside a loop."""
    program = jax.make_jaxpr(function)(*arrays)
    return Counter(
        (type(equation.params["maker"]).__name__, is_in_loop)
        for equation, is_in_loop in equations(program.jaxpr)
        if equation.primitive.name == "attn_made_once"
    )
