"""The leading dims of a call's arrays: any number of them in the primitives, one in the spec.

All operands of a primitive have as many leading dims as query. They have the same sizes, except for
1 in a dim along which an operand is shared. So vmap only adds a dim in front, and XLA sees every
dim that it may shard. For the part of a call that one device computes, the leading dims are folded
into one batch axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.operands import ArrayType, Operand, is_mod_operand, with_axis, with_shared
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec

_PAGES = with_axis("p")

SHAREABLE = (*with_shared("b"), *_PAGES)
"""Operands that may be shared along any of the dims. dropout_key and mods_start are numbered by the
rows that share them, so they may be shared only along the last dims; the arrays of mods may be
shared along further dims."""


Bind = Callable[[AttentionOptions], Callable[..., list[jax.Array]]]
"""Returns, for the options of a call, the function that one device computes. It takes and returns
arrays with one batch axis."""


@dataclass(frozen=True)
class LeadingCall:
    """The options and operands of a call of the primitives; hashable."""

    options: AttentionOptions
    operands: tuple[Operand, ...]

    @staticmethod
    def of(avals: Sequence[ArrayType], options: AttentionOptions) -> LeadingCall:
        """The call with these abstract values, in the order of `options.operands`."""
        return LeadingCall(options, AttentionSpec.of(avals, options).operands)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {operand.name: operand.shape for operand in self.operands}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an operand of the call."""
        return self._shapes[name]

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """The leading dims of query."""
        return self.shape("query")[:-3]

    @cached_property
    def spec(self) -> AttentionSpec:
        """The spec of the folded call."""
        if self._is_folded:
            return AttentionSpec(self.options, self.operands)
        folded = (replace(x, shape=self._folded_shape(x.name)) for x in self.operands)
        return AttentionSpec(self.options, tuple(folded))

    @cached_property
    def _is_folded(self) -> bool:
        """Whether folding changes nothing: there is one batch axis, and no pages, which may have to
        be repeated even so."""
        return len(self.dims) == 1 and not set(_PAGES) & self._shapes.keys()

    def leading(self, name: str) -> tuple[int, ...]:
        """The leading dims of an operand."""
        return self.shape(name)[: len(self.dims)]

    def fold(self, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The operands with one batch axis."""
        if self._is_folded:
            return dict(operands)
        return {name: self._folded(name, x) for name, x in operands.items()}

    def unfold(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """The folded call's results with the leading dims restored: those of query, or for a
        gradient those of its operand."""
        if self._is_folded:
            return list(results)
        if not self.options.wanted.gradients:
            return [x.reshape(*self.dims, *x.shape[1:]) for x in results]
        return [
            self._gradient(name, x)
            for name, x in zip(self.options.wanted.gradients, results, strict=True)
        ]

    def fold_shared(self, x: jax.Array) -> jax.Array:
        """An array that is no operand, with one batch axis. It may be shared along any dims."""
        count = len(self.dims)
        if count == 1:
            return x
        is_shared = all(size == 1 for size in x.shape[:count])
        dims = (1,) * count if is_shared else self.dims
        return jnp.broadcast_to(x, (*dims, *x.shape[count:])).reshape(-1, *x.shape[count:])

    def unfold_shared(self, x: jax.Array) -> jax.Array:
        """An array [1|B, …] that is no operand, with the leading dims."""
        is_whole = x.shape[0] == math.prod(self.dims)
        return x.reshape(*(self.dims if is_whole else (1,) * len(self.dims)), *x.shape[1:])

    def results_by(self, bind: Bind, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The results of the call on one device, in the order of `spec.result_names`.

        Arrays that follow the operands (core/mask_arrays.py) are folded with them.
        """
        count = len(self.options.operands)
        by_name = dict(zip(self.options.operands, operands[:count], strict=True))
        further = map(self.fold_shared, operands[count:])
        return tuple(self.unfold(bind(self.options)(*self.fold(by_name).values(), *further)))

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The results' shapes and dtypes, in the order of `spec.result_names`."""
        folded = self.spec.results
        if self._is_folded:
            return folded
        if self.options.wanted.gradients:
            shapes = [self.shape(name) for name in self.options.wanted.gradients]
        else:
            shapes = [(*self.dims, *x.shape[1:]) for x in folded]
        return tuple(
            jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, folded, strict=True)
        )

    def _is_repeated(self, name: str) -> bool:
        """Whether an operand is shared along only some of the dims, and so must be repeated."""
        leading = self.leading(name)
        is_shared = name not in _PAGES and all(size == 1 for size in leading)
        return not is_shared and leading != self._unshared(name)

    def _unshared(self, name: str) -> tuple[int, ...]:
        """The leading dims of an operand after it is repeated along the dims that it is shared
        along, as far as it may be."""
        if is_mod_operand(name):
            return self.leading("mods_start")
        if name in _PAGES:  # one pool serves all rows that share both operands
            pools = [self.leading(x) for x in _PAGES]
            own = max((i + 1 for x in pools for i, size in enumerate(x) if size != 1), default=0)
            return self.dims[:own] + self.leading(name)[own:]
        return self.dims if name in SHAREABLE else self.leading(name)

    def _folded_shape(self, name: str) -> tuple[int, ...]:
        shape = self.shape(name)
        leading = self._unshared(name) if self._is_repeated(name) else self.leading(name)
        return (math.prod(leading), *shape[len(leading) :])

    def _folded(self, name: str, x: jax.Array) -> jax.Array:
        if self._is_repeated(name):
            x = jnp.broadcast_to(x, (*self._unshared(name), *x.shape[len(self.dims) :]))
        return x.reshape(self._folded_shape(name))

    def _gradient(self, name: str, x: jax.Array) -> jax.Array:
        """The gradient of an operand, with the operand's leading dims.

        If the operand was repeated, the gradients of its copies are summed, in float32 at least.
        """
        if not self._is_repeated(name):
            return x.reshape(self.shape(name))
        leading = self.leading(name)
        over = tuple(i for i, size in enumerate(leading) if size == 1)
        x = x.reshape(*self._unshared(name), *x.shape[1:])
        wide = x.astype(np.promote_types(x.dtype, np.float32))
        return wide.sum(over, keepdims=True).astype(x.dtype)
