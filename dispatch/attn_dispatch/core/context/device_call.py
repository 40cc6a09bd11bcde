"""One device's part of a call whose rows and keys are spread over devices, and its pieces.

A piece is a call of some of the device's rows and of keys that the device holds or has received.
In the forward pass the results of pieces are merged by lse. In the backward pass each piece gets
the merged out and lse, and the gradients of pieces are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_dispatch.call.context import Context
from attn_dispatch.call.leading import Bind, LeadingCall
from attn_dispatch.call.operands import axes_along
from attn_dispatch.call.options import AttentionOptions, Meaning
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import jax_compat
from attn_dispatch.typed_jax import flattened

R = TypeVar("R")
Arrays = dict[str, jax.Array]
"""Operands or results by name."""

ROWS = axes_along("t", apart_from="s")
"""The axis of queries in operands and results, except those over pairs."""
KEYS = axes_along("s", apart_from="t")
"""The axis of keys in operands, except those over pairs."""


@dataclass(frozen=True)
class DeviceCall:
    """A device's part of a call."""

    bind: Bind
    options: AttentionOptions
    operands: Mapping[str, jax.Array]
    context: Context

    @staticmethod
    def of(
        bind: Bind, options: AttentionOptions, operands: Sequence[jax.Array], context: Context
    ) -> DeviceCall:
        """The part with these operands, in the order of `options.operands`."""
        varying = jax_compat.vary_alike(operands)
        return DeviceCall(bind, options, dict(zip(options.operands, varying, strict=True)), context)

    @property
    def meaning(self) -> Meaning:
        return self.options.meaning

    @property
    def is_backward(self) -> bool:
        return bool(self.options.wanted.gradients)

    @cached_property
    def call(self) -> LeadingCall:
        """The call of the device's own rows and keys alone."""
        return LeadingCall.of(tuple(self.operands.values()), self.options)

    @cached_property
    def rows(self) -> dict[str, int]:
        """The axis of rows in operands and results."""
        scores = (x for x in ("bias", "mask") if x in self.operands)
        return ROWS | {x: -2 for x in scores if self.operands[x].shape[-2] > 1}

    @property
    def number(self) -> jax.Array:
        """The position of this device along the axes."""
        return lax.axis_index(self.context.axes)

    def only(self, names: Container[str]) -> Arrays:
        """The operands with these names."""
        return {name: x for name, x in self.operands.items() if name in names}

    def own_lengths(self, name: str, own: int) -> Arrays:
        """How many of the device's `own` contiguous rows or keys the lengths `name` include.

        Empty if the call has no such lengths. A length outside the whole sequence stays invalid.
        """
        if name not in self.operands:
            return {}
        lengths = self.operands[name]
        is_valid = (lengths >= 0) & (lengths <= own * self.context.devices)
        here = jnp.clip(lengths - self.number * own, 0, own)
        return {name: jnp.where(is_valid, here, -1)}

    def piece(
        self,
        operands: Mapping[str, jax.Array] | None = None,
        *,
        meaning: Meaning | None = None,
        without: tuple[str, ...] = (),
        is_part: bool = True,
    ) -> Arrays:
        """The results of a piece by name: out and lse, or gradients.

        Args:
          operands: what replaces the device's own operands.
          meaning: what replaces the meaning of the device's call.
          without: names of operands that the piece leaves out.
          is_part: whether its keys are only a part of those that its rows attend to.
        """
        given = dict(self.operands) | dict(operands or {})
        given = {x: y for x, y in given.items() if x not in without}
        wanted = replace(self.options.wanted, partner=None)
        if self.is_backward:
            gradients = tuple(x for x in wanted.gradients if x in given)
            wanted = replace(wanted, gradients=gradients)
        elif is_part:
            wanted = replace(wanted, needs_lse=True)
        options = replace(
            self.options,
            operands=tuple(given),
            meaning=meaning or self.meaning,
            wanted=wanted,
            promises=replace(self.options.promises, is_part=is_part and self.is_backward),
        )
        call = LeadingCall.of(tuple(given.values()), options)
        results = call.results_by(self.bind, tuple(given.values()))
        return dict(zip(call.spec.result_names, results, strict=True))

    def unfolded(
        self, name: str, gradient: Callable[[AttentionSpec, Arrays], jax.Array]
    ) -> jax.Array:
        """The gradient of an operand by a function of a spec and operands with one batch axis."""
        wanted = replace(self.options.wanted, gradients=(name,), partner=None)
        call = LeadingCall(self.options.returning(wanted), self.call.operands)
        result = gradient(call.spec, call.fold(self.operands))
        return call.unfold([result])[0]

    def shift(self, arrays: Mapping[str, jax.Array]) -> Arrays:
        """The arrays of the device before this one, cyclically; each device sends its own on."""
        devices = self.context.devices
        pairs = [(i, (i + 1) % devices) for i in range(devices)]
        return self.send_together(arrays, pairs)

    def send_together(
        self, arrays: Mapping[str, jax.Array], pairs: Sequence[tuple[int, int]]
    ) -> Arrays:
        """As `send`, in one permute for all arrays of one shape.

        XLA hides one permute at a time behind a kernel. Stacking copies the arrays, which takes
        less time than a permute that is not hidden.
        """
        received = Arrays()
        for names in _alike_in_shape(arrays):
            if len(names) == 1:
                received |= self.send({names[0]: arrays[names[0]]}, pairs)
                continue
            stacked = self.send({"": jnp.stack([arrays[x] for x in names])}, pairs)[""]
            received |= dict(zip(names, stacked, strict=True))
        return received

    def send(self, arrays: Mapping[str, jax.Array], pairs: Sequence[tuple[int, int]]) -> Arrays:
        """The arrays sent between devices, from the first to the second of each pair; zeros on a
        device that gets none."""
        axes = self.context.axes
        return {x: cast("jax.Array", lax.ppermute(y, axes, pairs)) for x, y in arrays.items()}

    def rounded(self, results: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """The results in the order and the dtypes of the device's call."""
        spec = self.call.spec
        return tuple(
            results[name].astype(x.dtype)
            for name, x in zip(spec.result_names, spec.results, strict=True)
        )


def _alike_in_shape(arrays: Mapping[str, jax.Array]) -> Iterable[list[str]]:
    """The names of arrays, those of one shape and dtype together."""
    groups = dict[tuple[tuple[int, ...], np.dtype], list[str]]()
    for name, x in arrays.items():
        groups.setdefault((x.shape, x.dtype), []).append(name)
    return groups.values()


def alike(branch: Callable[[Arrays], R]) -> Callable[[Arrays], R]:
    """The branch of a `lax.cond`, whose results vary like its arguments along the axes of a
    surrounding shard_map."""

    def varied(arrays: Arrays) -> R:
        leaves, rebuilt = flattened(branch(arrays))
        given = cast("list[jax.Array]", leaves)
        return cast("R", rebuilt(jax_compat.vary_alike((*given, *arrays.values()))[: len(given)]))

    return varied


def wide(arrays: Mapping[str, jax.Array]) -> Arrays:
    """Arrays of 16 bits as float32, so that a sum of them is rounded once."""
    return {x: y.astype(np.promote_types(y.dtype, np.float32)) for x, y in arrays.items()}


def added(a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> Arrays:
    """The sums of arrays by name, in float32 at least."""
    a, b = wide(a), wide(b)
    return {x: a[x] + b[x] if x in a and x in b else (a | b)[x] for x in a | b}


def half(arrays: Mapping[str, jax.Array], axes: Mapping[str, int], which: int) -> Arrays:
    """The first or second half, 0 or 1, of those arrays that have one of these axes."""

    def cut(x: jax.Array, axis: int) -> jax.Array:
        size = x.shape[axis] // 2
        return lax.slice_in_dim(x, which * size, (which + 1) * size, axis=axis)

    return {x: cut(y, axes[x]) for x, y in arrays.items() if x in axes}


def from_half(x: jax.Array, axis: int, which: int, fill: float = 0) -> jax.Array:
    """An array twice as long as x, its first or second half; the rest is `fill`."""
    rest = jnp.full_like(x, fill)
    return jnp.concatenate([rest, x] if which else [x, rest], axis)
