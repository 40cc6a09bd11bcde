"""Peers, and the base of those that are called from JAX."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from attn_dispatch_tools.bench.arrays import BATCH, Arrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.jax_program import JaxProgram


class Program(Protocol):
    """A cell's call in one direction, compiled and run once."""

    facts: dict[str, Any]
    """memory_bytes, or None; first_call_ms, by step."""

    def seconds(self, calls: int) -> float:
        """Wall time per call of `calls` calls queued back to back."""
        ...

    def device_seconds(self, calls: int) -> tuple[float | None, str]:
        """Device time per call, or None and why it is not known."""
        ...

    def results(self) -> list[jax.Array] | None:
        """Its results, as [rows, heads, dim]; None if they are not available here."""
        ...


class Peer(Protocol):
    """A package, or one way to call it."""

    name: str

    def version(self) -> str:
        """The version that is installed; empty if none is."""
        ...

    def absent(self) -> str:
        """Why it cannot be used here at all; empty if it can."""
        ...

    def concerns(self, cell: Cell) -> bool:
        """False where it would only repeat another peer."""
        ...

    def notes(self, cell: Cell, arrays: Arrays) -> dict[str, Any]:
        """Further facts about it in a cell, for the report."""
        ...

    def program(self, cell: Cell, direction: str, arrays: Arrays) -> Program:
        """The program of a cell in the direction "forward", "backward" or "forward_backward".

        Raises:
          Exception: it does not support this call; the exception is the reason.
        """
        ...

    def release(self) -> None:
        """Free what its programs hold outside this process."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@dataclass(frozen=True)
class PeerCall:
    """A function of query, key, value and the arrays in `extra`, in a layout of `arrays`."""

    function: Callable[..., jax.Array]
    layout: str = BATCH
    extra: Sequence[jax.Array] = ()
    """Lengths and the like, which are operands as in training."""


class JaxPeer:
    """A peer that is a function of JAX arrays: the rest follows from `call`."""

    name: str
    distributions: tuple[str, ...] = ()
    """The names of the distributions, any of which suffices."""
    module: str = ""

    def version(self) -> str:
        for distribution in self.distributions:
            try:
                return f"{distribution} {importlib.metadata.version(distribution)}"
            except importlib.metadata.PackageNotFoundError:
                continue
        return ""

    def absent(self) -> str:
        return why_absent(self.module, self.distributions[0])

    def package(self) -> Any:
        """The module, imported."""
        return importlib.import_module(self.module)

    def concerns(self, cell: Cell) -> bool:
        return True

    def notes(self, cell: Cell, arrays: Arrays) -> dict[str, Any]:
        return {}

    def call(self, cell: Cell, arrays: Arrays) -> PeerCall:
        """Raises an exception where the package has no such call."""
        raise NotImplementedError

    def program(self, cell: Cell, direction: str, arrays: Arrays) -> Program:
        call = self.call(cell, arrays)
        return JaxProgram(call.function, call.layout, call.extra, direction, arrays)

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


def why_absent(module: str, distribution: str) -> str:
    """Why a package cannot be imported; empty if it can."""
    if importlib.util.find_spec(module) is None:
        return f"not installed: pip install {distribution}"
    try:
        importlib.import_module(module)
    except Exception as error:  # other packages may raise anything
        return f"cannot be imported: {first_line(error)}"
    return ""


def first_line(error: BaseException) -> str:
    """The kind and the first line of an exception, at most 300 characters."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
