"""What a peer is, and how one that is called from JAX becomes a program."""

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
        """Device time per call, or None and why it cannot be told."""
        ...

    def results(self) -> list[jax.Array] | None:
        """What it computes, as [rows, heads, dim]; None if that cannot be had here."""
        ...


class Peer(Protocol):
    """A package, or one way to call it."""

    name: str

    def version(self) -> str:
        """Of what is installed; empty if nothing is."""
        ...

    def absent(self) -> str:
        """Why it cannot be used here at all; empty if it can."""
        ...

    def concerns(self, cell: Cell) -> bool:
        """False where it would only repeat another peer."""
        ...

    def notes(self, cell: Cell, arrays: Arrays) -> dict[str, Any]:
        """What else a report says of it in a cell."""
        ...

    def program(self, cell: Cell, direction: str, arrays: Arrays) -> Program:
        """Of "forward", "backward" or "forward_backward".

        Raises:
          Exception: it does not take this call. What is raised is the reason.
        """
        ...

    def release(self) -> None:
        """Give back what its programs hold outside of this process."""
        ...

    def close(self) -> None:
        """Give back everything."""
        ...


@dataclass(frozen=True)
class Call:
    """A function of query, key, value and what `extra` holds, in a layout of `arrays`."""

    function: Callable[..., jax.Array]
    layout: str = BATCH
    extra: Sequence[jax.Array] = ()
    """Arrays: lengths and the like are operands, as they are in training."""


class JaxPeer:
    """A peer that is a function of JAX arrays: the rest follows from `call`."""

    name: str
    distributions: tuple[str, ...] = ()
    """What it is called where it is installed from; several if any of them will do."""
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

    def call(self, cell: Cell, arrays: Arrays) -> Call:
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
    except Exception as error:  # of a package that is not ours: anything may go wrong in there
        return f"cannot be imported: {first_line(error)}"
    return ""


def first_line(error: BaseException) -> str:
    """Of what an exception says, with its kind, at most 300 characters."""
    said = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {said}"[:300] if said else type(error).__name__
