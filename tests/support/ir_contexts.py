"""Contexts of MLIR that are used again, in JAX before 0.12, which makes one for every lowering.

To make one takes 6 ms, and tests lower tens of thousands of small programs: a fifth of their time.
"""

from __future__ import annotations

import threading
from typing import Any

from jax._src.interpreters import mlir
from jaxlib.mlir import ir

_USES = 10
"""What a context interns is never freed, so none is kept for long: JAX 0.12 has this number too."""


def use_again() -> None:
    if hasattr(mlir, "_thread_local_context"):  # it does so by itself
        return
    make, kept = mlir.make_ir_context, threading.local()

    def make_or_use_again() -> Any:
        context, uses = getattr(kept, "value", (None, _USES))
        if is_in_use():  # a lowering rule computes something
            return make()
        if uses == _USES:
            context, uses = make(), 0
        kept.value = context, uses + 1
        return context

    mlir.make_ir_context = make_or_use_again


def is_in_use() -> bool:
    """Whether this thread is lowering; a program made then would become a part of the other."""
    try:
        return ir.Context.current is not None
    except ValueError:
        return False
