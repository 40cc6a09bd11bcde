"""Reuse of MLIR contexts in JAX before 0.12, which makes a context for every lowering.

A context takes 6 ms, and tests lower tens of thousands of small programs: a fifth of their time.
"""

from __future__ import annotations

import threading
from typing import Any

from jax._src.interpreters import mlir

_MAX_USES = 10
"""A context never frees what it interns, so none is kept for long: JAX 0.12 has the same limit."""


def reuse_contexts() -> None:
    if hasattr(mlir, "_thread_local_context"):  # JAX reuses contexts itself
        return
    make, kept = mlir.make_ir_context, threading.local()

    def make_or_reuse() -> Any:
        context, uses = getattr(kept, "value", (None, _MAX_USES))
        if is_lowering():  # a lowering rule computes something
            return make()
        if uses == _MAX_USES:
            context, uses = make(), 0
        kept.value = context, uses + 1
        return context

    mlir.make_ir_context = make_or_reuse


def is_lowering() -> bool:
    """Whether this thread is lowering a program, of which another one would become a part."""
    try:
        return mlir.ir.Context.current is not None
    except ValueError:
        return False
