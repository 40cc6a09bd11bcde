"""Counts the files, functions and calls of the package that JAX enters to lower a causal call.

usage: python -m tests.scripts.lowering_calls [--verbose] [--target NAME]

The call is bfloat16, 2 rows of 1,024 tokens, 32 heads on 8 kv heads of 128 dims. The script prints
a line for the first such call of a process, which finds libraries and starts a planning process,
and one for a later call of another length, which is planned as well.
"""

from __future__ import annotations

import argparse
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


def entered(function: Callable[..., Any], length: int = 1024, target: str = "sm90") -> Entered:
    """Count the calls made while a function is lowered, without those of tracing."""
    query = jax.ShapeDtypeStruct((2, length, 32, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, length, 8, 128), jnp.bfloat16)
    traced = jax.jit(function).trace(query, key, key)
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            calls[code.co_filename[len(_PACKAGE) + 1 :], code.co_qualname] += 1

    with attn_dispatch.target(target), attn_dispatch.fallback("silent"):
        sys.setprofile(note)
        try:
            traced.lower(lowering_platforms=(PLATFORMS[target],))
        finally:
            sys.setprofile(None)
    return Entered(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--verbose", action="store_true", help="a line for each file, too")
    parser.add_argument("--target", choices=PLATFORMS, default="sm90")
    args = parser.parse_args()
    for name, function in FUNCTIONS.items():
        for when, length in (("first", 512), ("later", 1024)):
            found = entered(function, length, args.target)
            print(f"{name}, {when}: {found}")
            if args.verbose:
                print(found.by_file())


if __name__ == "__main__":
    main()
