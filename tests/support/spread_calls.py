"""Attention calls whose sequences are spread over the devices of a mesh, and how wrong they are.

A call runs on the mesh and on one device. The devices are those of the process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel, dot_product_attention, sequence
from attn_dispatch.call.context import SequenceOrder
from attn_dispatch.core.context import compute
from tests.support.present import present

Arrays = dict[str, Any]
Function = Callable[[Arrays], Any]

LAYERS = 2
LETTERS = {
    "query": "f b t n h", "key": "f b s k h", "value": "f b s k v",
    "bias": "b n t c", "mask": "b n t c", "sinks": "n", "alibi_slopes": "n",
    "query_segment_ids": "b t", "key_value_segment_ids": "b s", "scale": "",
    "query_seq_lengths": "b", "key_value_seq_lengths": "b",
    "out": "f b t n v", "lse": "f b t n", "max_logits": "f b t n",
}  # fmt: skip
"""The dims of arguments and results. f is a leading dim that no mesh axis splits, c the keys of all
devices."""
FLOATS = ("query", "key", "value", "bias", "sinks", "alibi_slopes", "scale")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@dataclass(frozen=True)
class Spread:
    """How a call is spread over a mesh."""

    mesh: dict[str, int] = field(default_factory=lambda: {"context": 8})
    """The size of each axis. "context…" splits rows and keys, "data…" the batch, "tensor" heads."""
    kind: str = "Auto"
    """The type of the axes outside a shard_map."""
    manual: tuple[str, ...] = ()
    """The axes of a shard_map around the call."""
    strategy: str = "auto"
    order: SequenceOrder = "contiguous"
    check_vma: bool = True

    def axes(self, kind: str) -> tuple[str, ...]:
        """The mesh axes of which the names begin so."""
        return tuple(x for x in self.mesh if x.startswith(kind))

    def ways(self, kind: str) -> int:
        return math.prod(self.mesh[x] for x in self.axes(kind))

    @property
    def has_argument(self) -> bool:
        """Whether the call has a context_axis: the axes that split rows are manual."""
        return bool(self.manual) and set(self.axes("context")) <= set(self.manual)


@dataclass(frozen=True)
class Case:
    """A call, and what is computed of it."""

    spread: Spread = field(default_factory=Spread)
    batch: int = 0
    """0: the arrays have no batch dim."""
    front: int = 0
    """The size of a leading dim before the batch that no axis splits; 0 for none."""
    rows: int = 4
    """The rows of one device."""
    keys: int = 0
    """The keys of one device; 0: as many as rows."""
    queries: int = 0
    """The rows of every device, where only keys are split."""
    heads: int = 2
    kv_heads: int = 1
    dim: int = 4
    dim_v: int = 4
    further: tuple[str, ...] = ()
    """The names of further arrays."""
    shared: tuple[str, ...] = ()
    """Letters of dims that bias and mask have only once."""
    options: dict[str, Any] = field(default_factory=dict)
    program: str = "call"
    """"call", "vmap" over the front dim, or "layers": a scan with remat."""
    derivative: str = "vjp"
    """"vjp", "jvp", or "inside": a vjp in the shard_map."""
    seed: int = 0

    def size(self, letter: str) -> int:
        devices = self.spread.ways("context")
        keys = (self.keys or self.rows) * devices
        queries = self.queries or self.rows * devices
        return {
            "f": self.front, "b": self.batch, "t": queries, "s": keys, "c": keys,
            "n": self.heads, "k": self.kv_heads, "h": self.dim, "v": self.dim_v,
        }[letter]  # fmt: skip

    def letters(self, name: str) -> list[str]:
        """The dims of an array, in order."""
        found = [x for x in LETTERS[name].split() if x not in "fb" or self.size(x)]
        if self.options.get("qkv_layout") == "BNTH" and name in (
            "query", "key", "value", "out", "lse", "max_logits",
        ):  # fmt: skip
            i = next(i for i, x in enumerate(found) if x in "ts")
            found[i], found[i + 1] = found[i + 1], found[i]
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        shared = self.shared if name in ("bias", "mask") else ()
        return tuple(1 if x in shared else self.size(x) for x in self.letters(name))

    def spec(self, name: str, only: tuple[str, ...] | None = None) -> P:
        """How an array is split, along some axes or all."""
        axes = {"b": "data", "s": "context", "n": "tensor", "k": "tensor"}
        axes |= {"c": "context"} if self.queries else {"t": "context"}
        entries = list[tuple[str, ...] | None]()
        for letter, size in zip(self.letters(name), self.shape(name), strict=True):
            found = self.spread.axes(axes[letter]) if letter in axes else ()
            if not found or size % self.spread.ways(axes[letter]):
                entries.append(None)
                continue
            entries.append(tuple(x for x in found if only is None or x in only) or None)
        return P(*entries)

    @property
    def names(self) -> tuple[str, ...]:
        return ("query", "key", "value", *self.further)

    @property
    def results(self) -> tuple[str, ...]:
        if self.program == "layers":
            return ("out",)
        wanted = (x for x in ("lse", "max_logits") if self.options.get(f"return_{x}"))
        return ("out", *wanted)


def arrays(case: Case) -> Arrays:
    """The arrays of a call by name, and random arrays like its floating ones and its results."""
    rng = np.random.default_rng(case.seed)

    def normal(name: str) -> np.ndarray:
        return rng.standard_normal(case.shape(name)).astype(np.float32)

    made = Arrays()
    for name in case.names:
        if name.endswith("segment_ids") and case.spread.order == "documents":
            made[name] = _ids_of_documents(case, rng)
        elif name.endswith("segment_ids"):
            ids = np.sort(rng.integers(1, 4, case.shape(name)), axis=-1)
            padding = rng.integers(0, 1 + ids.shape[-1] // 3)
            made[name] = np.where(np.arange(ids.shape[-1]) < ids.shape[-1] - padding, ids, 0)
            made[name] = made[name].astype(np.int32)
        elif name.endswith("seq_lengths"):
            longest = case.size("t" if name.startswith("query") else "s")
            made[name] = rng.integers(1, longest + 1, case.shape(name)).astype(np.int32)
        elif name == "mask":
            made[name] = rng.random(case.shape(name)) < 0.7
        elif name == "scale":
            made[name] = np.float32(0.4)
        else:
            made[name] = abs(normal(name)) if name == "alibi_slopes" else normal(name)
    directions = {f"d_{x}": normal(x) for x in case.names if x in FLOATS}
    weights = {f"w_{x}": normal(x) for x in case.results}
    return made | directions | weights


def _ids_of_documents(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Segment ids whose documents have equal chunks for all devices, twice; some end in padding."""
    unit, *leading = 2 * case.spread.ways("context"), *case.shape("query_segment_ids")[:-1]
    units = np.sort(rng.integers(1, 4, (*leading, case.rows // 2)), axis=-1)
    real = rng.integers(1, units.shape[-1], (*leading, 1), endpoint=True)
    ids = np.repeat(np.where(np.arange(units.shape[-1]) < real, units, 0), unit, axis=-1)
    rest = case.size("t") - ids.shape[-1]
    return np.pad(ids, [*((0, 0) for _ in leading), (0, rest)]).astype(np.int32)


def function(case: Case, spread: Spread | None) -> Function:
    """The results, and the derivatives, of the arrays; on one device if spread is None."""
    call = _program(case, spread)
    if spread is None or not spread.manual:
        return partial(_derived, case, call)
    if case.derivative == "inside":
        return _in_shard_map(case, spread, partial(_derived, case, call), is_derived=True)
    return partial(_derived, case, _in_shard_map(case, spread, call))


def _program(case: Case, spread: Spread | None) -> Function:
    """The results by name, of the call's arrays by name."""
    extra = Arrays()
    if spread is not None and spread.has_argument:
        axes = spread.axes("context")
        extra = {
            "context_axis": axes[0] if len(axes) == 1 else axes, "sequence_order": spread.order,
        }  # fmt: skip

    def attend(given: Arrays, **options: Any) -> Arrays:
        found = dot_product_attention(**given, **(case.options | options | extra))
        found = found if isinstance(found, tuple) else (found,)
        return dict(zip(case.results, found, strict=True))

    def mapped(given: Arrays) -> Arrays:
        axes = {x: 0 if x in ("query", "key", "value") else None for x in given}
        return jax.vmap(attend, in_axes=(axes,))(given)

    def layers(given: Arrays) -> Arrays:
        policy = jax.checkpoint_policies.save_only_these_names("context")

        def layer(query: jax.Array, factor: jax.Array) -> tuple[jax.Array, None]:
            found = attend(given | {"query": query, "key": given["key"] * factor}, return_lse=False)
            return jnp.sin(found["out"]) + query, None

        layer = jax.checkpoint(layer, policy=policy)
        return {"out": jax.lax.scan(layer, given["query"], jnp.arange(1.0, 1 + LAYERS) / 2)[0]}

    return {"call": attend, "vmap": mapped, "layers": layers}[case.program]


def _in_shard_map(
    case: Case, spread: Spread, call: Function, *, is_derived: bool = False
) -> Function:
    """The call in a shard_map."""

    def run(given: Arrays) -> Any:
        outs: Any = {x: case.spec(x, spread.manual) for x in case.results}
        if is_derived:
            outs = outs, {x: case.spec(x, spread.manual) for x in case.names if x in FLOATS}
        return jax.shard_map(
            call, axis_names=set(spread.manual), out_specs=outs, check_vma=spread.check_vma,
            in_specs=({x: case.spec(_plain(x), spread.manual) for x in given},),
        )(given)  # fmt: skip

    return run


def moved(case: Case, given: Any, move: Callable[..., Any]) -> Any:
    """Arrays by name, or a tuple of such, with rows put in the order of the spread or back."""
    if isinstance(given, tuple):
        return tuple(moved(case, x, move) for x in given)
    ways, order = case.spread.ways("context"), _order(case)

    def one(name: str, x: np.ndarray) -> np.ndarray:
        letters = case.letters(_plain(name))
        rows = next((i for i, letter in enumerate(letters) if letter in "ts"), None)
        if rows is None or x.shape[rows] == 1 or case.queries:
            return x
        if letters[0] == "f":
            return np.stack([move(y, ways, order=order, axis=rows - 1) for y in x])
        return move(x, ways, order=order, axis=rows)

    return {name: one(name, x) for name, x in given.items()}


def _order(case: Case) -> sequence.Order:
    if case.spread.order != "documents":
        return case.spread.order
    ids = arrays(case)["query_segment_ids"]
    return sequence.balance(ids, case.spread.ways("context"))


def _plain(name: str) -> str:
    return name.removeprefix("d_").removeprefix("w_")


def _derived(case: Case, call: Function, given: Arrays) -> Any:
    """The results of the call, and its gradients by weights or its tangents."""
    given = dict(given)
    weights = {x: given.pop(f"w_{x}") for x in case.results}
    directions = {x: given.pop(f"d_{x}") for x in case.names if x in FLOATS}
    rest = {x: y for x, y in given.items() if x not in directions}
    floats = {x: given[x] for x in directions}

    def of_floats(floats: Arrays) -> Arrays:
        return call(floats | rest)

    if case.derivative == "jvp":
        return jax.jvp(of_floats, (floats,), (directions,))
    found, pull = jax.vjp(of_floats, floats)
    # A dead row's lse is -inf whatever its operands are.
    weights = {x: jnp.where(jnp.isfinite(found[x]), y, 0) for x, y in weights.items()}
    return found, pull(weights)[0]


@dataclass(frozen=True)
class Measured:
    """What a case gave on its mesh."""

    error: float
    """The largest error, as a part of the largest number of the array."""
    errors: dict[str, float]
    strategies: tuple[str, ...]
    """How devices exchanged keys, for each time that a call was lowered; none if they did not."""
    collectives: dict[str, int]


def measured(case: Case) -> Measured:
    """Run a case on its mesh and on one device."""
    ran: list[str] = []
    results = compute.results

    def recorded(bind: Any, options: Any, operands: Any, context: Any) -> Any:
        ran.append(context.strategy)
        return results(bind, options, operands, context)

    with mock.patch.object(compute, "results", recorded), _surroundings(case) as mesh:
        placed = _placed(case, mesh)
        compiled = jax.jit(function(case, case.spread)).lower(placed).compile()
        got = jax.device_get(compiled(placed))
    errors = _errors(case, got)
    text = present(compiled.as_text())
    counts = {x: len(re.findall(rf" {x}(?:-start)?\(", text)) for x in COLLECTIVES}
    counts = {x: n for x, n in counts.items() if n}
    return Measured(max(errors.values()), errors, tuple(ran), counts)


def errors_in_every_process(case: Case) -> dict[str, float]:
    """The errors of a case on a mesh over the devices of several processes."""

    def whole(given: Arrays) -> Any:
        # Every process gets all rows of all results.
        found = function(case, case.spread)(given)
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, P()), found)

    with _surroundings(case) as mesh:
        got = jax.tree.map(lambda x: x.addressable_data(0), jax.jit(whole)(_placed(case, mesh)))
    return _errors(case, jax.device_get(got))


@contextmanager
def _surroundings(case: Case) -> Generator[jax.sharding.Mesh]:
    spread = case.spread
    kinds = (AxisType[spread.kind],) * len(spread.mesh)
    mesh = jax.make_mesh(tuple(spread.mesh.values()), tuple(spread.mesh), axis_types=kinds)
    with jax.set_mesh(mesh), context_parallel(spread.strategy):  # pyright: ignore[reportArgumentType]
        yield mesh


def _placed(case: Case, mesh: jax.sharding.Mesh) -> Arrays:
    return {
        x: jax.device_put(y, NamedSharding(mesh, case.spec(_plain(x))))
        for x, y in moved(case, arrays(case), sequence.reorder).items()
    }


def _errors(case: Case, got: Any) -> dict[str, float]:
    """The errors by path of the results; on one device of this process the case is right."""
    with jax.default_device(jax.local_devices()[0]):
        expected = jax.device_get(jax.jit(function(case, None))(arrays(case)))
    found = jax.tree_util.tree_leaves_with_path(moved(case, got, sequence.restore))
    return {
        jax.tree_util.keystr(path): relative(x, y)
        for (path, x), y in zip(found, jax.tree.leaves(expected), strict=True)
    }


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest error as a part of the largest number; infinite if other numbers are infinite."""
    is_finite = np.isfinite(expected)
    if got.shape != expected.shape or not np.array_equal(is_finite, np.isfinite(got)):
        return math.inf
    if not np.array_equal(got[~is_finite], expected[~is_finite]):
        return math.inf
    # A single number, the gradient of a scale, is a sum of large ones that cancel.
    least = 1.0 if expected.ndim == 0 else 1e-2
    largest = max(least, np.max(abs(expected), where=is_finite, initial=0))
    difference = np.where(is_finite, got, 0) - np.where(is_finite, expected, 0)
    return float(np.max(abs(difference), initial=0) / largest)
