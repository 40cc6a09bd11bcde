"""What a peer is, and the base class of peers that are called from JAX."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from attn_dispatch_tools.bench.arrays import BATCH, CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.jax_program import JaxProgram


class MeasuredProgram(Protocol):
    """A cell's call in one direction, which was compiled and run once."""

    facts: dict[str, Any]
    """"memory_bytes", an int or None; "first_call_ms", by step."""

    def seconds(self, calls: int) -> float:
        """Wall time per call, if `calls` calls are queued back to back."""
        ...

    def device_seconds(self, calls: int) -> tuple[float | None, str]:
        """Device time per call, or None and why it is not known."""
        ...

    def results(self) -> list[jax.Array] | None:
        """The results, each [rows, heads, dim]; None if they cannot be compared with others'."""
        ...


class Peer(Protocol):
    """A package, or one way to call it."""

    name: str

    def version(self) -> str:
        """The installed version; empty if the package is not installed."""
        ...

    def absent(self) -> str:
        """Why no cell can be measured here; empty if some can."""
        ...

    def concerns(self, cell: Cell) -> bool:
        """False for cells in which this peer would only repeat another one."""
        ...

    def notes(self, cell: Cell, arrays: CellArrays) -> dict[str, Any]:
        """Facts about how this peer runs a cell, for the report."""
        ...

    def program(self, cell: Cell, direction: str, arrays: CellArrays) -> MeasuredProgram:
        """The program of a cell in the direction "forward", "backward" or "forward_backward".

        Raises:
          Exception: the package does not support this call; its message says why.
        """
        ...

    def release(self) -> None:
        """Free what this peer's programs hold in other processes."""
        ...

    def close(self) -> None:
        """Free everything that this peer holds, other processes included."""
        ...


@dataclass(frozen=True)
class PeerCall:
    """A function of query, key, value and further arrays; the layouts are those of arrays.py."""

    function: Callable[..., jax.Array]
    layout: str = BATCH
    further_arrays: Sequence[jax.Array] = ()
    """Arrays such as lengths. Like query, they are arguments of the jitted function."""


class JaxPeer:
    """A peer that is called from JAX. A subclass has names, and the method `call`."""

    name: str
    distributions: tuple[str, ...] = ()
    """The distributions of the package, any one of which suffices."""
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
        """The imported module."""
        return importlib.import_module(self.module)

    def concerns(self, cell: Cell) -> bool:
        return cell.mask is None

    def notes(self, cell: Cell, arrays: CellArrays) -> dict[str, Any]:
        return {}

    def call(self, cell: Cell, arrays: CellArrays) -> PeerCall:
        """How the package computes the cell; raises an exception if it does not support it."""
        raise NotImplementedError

    def program(self, cell: Cell, direction: str, arrays: CellArrays) -> MeasuredProgram:
        call = self.call(cell, arrays)

        def layers(q: jax.Array, *others: jax.Array) -> jax.Array:
            for _ in range(cell.calls):
                q = call.function(q, *others)
            return q

        function = call.function if cell.calls == 1 else layers
        return JaxProgram(function, call.layout, call.further_arrays, direction, arrays)

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


def is_installed(module: str) -> bool:
    """Whether the package is there, even if it cannot be imported."""
    return importlib.util.find_spec(module) is not None


def why_absent(module: str, distribution: str) -> str:
    """Why a package cannot be imported; empty if it can."""
    if not is_installed(module):
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
