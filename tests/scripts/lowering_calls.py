"""Counts the files, functions and calls of the package that a causal call enters.

usage: python -m tests.scripts.lowering_calls [--verbose] [--target NAME]

The call is bfloat16, 2 rows of 1,024 tokens, 32 heads on 8 kv heads of 128 dims, traced and lowered
by JAX. Everything counts: every function, comprehension and step of a generator. No fact is known
from an earlier call, because all caches of the package are cleared. Only libraries stay loaded, and
the planning process stays up.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import attn_dispatch

_PACKAGE = str(Path(attn_dispatch.__file__).parent)
PLATFORMS = {"sm90": "cuda", "gfx942": "rocm"}


@dataclass(frozen=True)
class Entered:
    """The number of calls of each function of the package, by file and name."""

    calls: Counter[tuple[str, str]]

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    def __str__(self) -> str:
        return f"{len(self.files)} files, {len(self.calls)} functions, {self.calls.total()} calls"

    def by_file(self) -> str:
        """A line for each file, in the order of the number of calls."""
        totals: Counter[str] = Counter()
        for (file, _), number in self.calls.items():
            totals[file] += number
        lines = []
        for file, total in totals.most_common():
            functions = [f"{name} {n}" for (x, name), n in self.calls.most_common() if x == file]
            lines.append(f"{total:5} {file}: {', '.join(functions)}")
        return "\n".join(lines)


def _attention(query: Any, key: Any, value: Any) -> Any:
    return attn_dispatch.dot_product_attention(query, key, value, is_causal=True)


def _gradients(*arrays: Any) -> Any:
    return jax.grad(lambda *x: _attention(*x).sum().astype(jnp.float32), (0, 1, 2))(*arrays)


FUNCTIONS: dict[str, Callable[..., Any]] = {"forward": _attention, "training": _gradients}


_OF_PROCESS = {"_load", "_planning_process"}
"""Functions whose caches hold a library that is loaded, or a process that runs."""


def forget_facts() -> None:
    """Clear all caches of the package, and JAX's."""
    for cache in gc.get_objects():
        if not isinstance(cache, functools._lru_cache_wrapper):
            continue
        module, name = str(cache.__module__), str(getattr(cache, "__name__", ""))
        if module.split(".")[0] == attn_dispatch.__name__ and name not in _OF_PROCESS:
            cache.cache_clear()
    jax.clear_caches()


def entered(function: Callable[..., Any], length: int = 1024, target: str = "sm90") -> Entered:
    """Count the calls made while a function is traced and lowered."""
    query = jax.ShapeDtypeStruct((2, length, 32, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, length, 8, 128), jnp.bfloat16)
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            calls[code.co_filename[len(_PACKAGE) + 1 :], code.co_qualname] += 1

    with attn_dispatch.target(target), attn_dispatch.fallback("silent"):
        sys.setprofile(note)
        try:
            jax.jit(function).trace(query, key, key).lower(lowering_platforms=(PLATFORMS[target],))
        finally:
            sys.setprofile(None)
    return Entered(calls)


def entered_anew(function: Callable[..., Any], target: str = "sm90") -> Entered:
    """The same for a call of which no fact is known, in a process that has lowered another one."""
    entered(function, 512, target)
    forget_facts()
    return entered(function, 1024, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--verbose", action="store_true", help="a line for each file, too")
    parser.add_argument("--target", choices=PLATFORMS, default="sm90")
    args = parser.parse_args()
    for name, function in FUNCTIONS.items():
        found = entered_anew(function, args.target)
        print(f"{name}: {found}")
        if args.verbose:
            print(found.by_file())


if __name__ == "__main__":
    main()
