"""The ranges of keys that a mask_mod leaves, from its program, without a look at pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Var

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.bounded_numbers import Number
from attn_dispatch.programs.key_sets import EqualKeys, KeySet, KeyTerm, key_set
from attn_dispatch.programs.nodes import XlaArray
from attn_dispatch.programs.program import INDICES, ModProgram
from attn_dispatch.semantics import mods
from attn_dispatch.semantics.interval_union import Range, any_of
from attn_dispatch.semantics.key_spans import EqualRuns, KeySpans, Numbers
from attn_dispatch.semantics.pair_indices import PairIndices
from attn_dispatch.typed_jax import type_of


def known_set(spec: AttentionSpec) -> KeySet | None:
    """The ranges of the call's mask_mod, if their ends can be computed without looking at pairs."""
    program = spec.meaning.mask_mod
    assert program is not None
    found = key_set(program)
    if found is None:
        return None
    equal = [x for term in found for x in term.equal]
    # In a packed row, an array by s has its entries anew in every sequence.
    if equal and spec.is_packed:
        return None
    return None if any(_is_scattered(x, spec.seq_len_kv) for x in equal) else found


def _is_scattered(equal: EqualKeys, keys: int) -> bool:
    """Whether other keys are known to be between those of some value, as with s % 2.

    It is not known of a value that depends on arrays.
    """
    jaxpr = equal.of_key.body.jaxpr
    read = {x for eqn in jaxpr.eqns for x in eqn.invars if isinstance(x, Var)}
    if not read.isdisjoint(jaxpr.invars[len(INDICES) :]) or "b" in equal.of_key.axes:
        return False
    return _has_scattered_values(equal.of_key, keys)


@lru_cache(maxsize=1024)
def _has_scattered_values(of_key: XlaArray, keys: int) -> bool:
    with jax.ensure_compile_time_eval():
        zero, places = jnp.zeros((1, 1), jnp.int32), jnp.arange(keys, dtype=jnp.int32)
        indices = PairIndices(zero[0], zero, zero, zero, places[None])
        unread = [type_of(x) for x in of_key.body.jaxpr.invars[len(INDICES) :]]
        arrays = [jnp.zeros((1, *x.shape), x.dtype) for x in unread]
        values = np.asarray(mods.xla_array(of_key, indices, arrays)).reshape(-1)
    number_of_runs = 1 + np.count_nonzero(values[1:] != values[:-1])
    return number_of_runs != np.unique(values).size


def mod_ranges(
    spec: AttentionSpec, operands: Mapping[str, jax.Array], spans: KeySpans, terms: KeySet
) -> tuple[list[Range], jax.Array | None]:
    """The terms' ranges inside the spans, and whether one of them is not a range; None: all are."""
    mod = _Mod.of(spec, operands, spans)
    ranges: list[Range] = []
    unknown: jax.Array | None = None
    for term in terms:
        found, has_others = mod.range_of(term)
        ranges.append(found)
        unknown = any_of(unknown, has_others)
    return ranges, unknown


@dataclass(frozen=True)
class _Mod:
    """A mask_mod with the arrays and the indices that it is called with."""

    program: ModProgram
    arrays: tuple[jax.Array, ...]
    indices: PairIndices
    spans: KeySpans

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array], spans: KeySpans) -> _Mod:
        program = spec.meaning.mask_mod
        assert program is not None
        keys = lax.broadcasted_iota(jnp.int32, (1, spec.seq_len_kv), 1)
        indices = PairIndices.of(spec, operands, spans.position, keys, spans.query_ids)
        assert indices is not None
        return _Mod(program, mods.arrays_of("mask_mod", program, operands), indices, spans)

    def range_of(self, term: KeyTerm) -> tuple[Range, jax.Array | None]:
        """The keys of a term, and whether other keys are between them."""
        first, end = self._number(term.first), self._number(term.end)
        runs = [self._run(equal) for equal in term.equal]
        for run in runs:
            first = run.first if first is None else jnp.maximum(first, run.first)
            end = run.end if end is None else jnp.minimum(end, run.end)
        found = self.spans.within(first, end)
        return found, any_of(*(run.has_others(found) for run in runs))

    def _number(self, number: Number | None) -> Numbers | None:
        if number is None:
            return None
        at, none = self.indices, [None for _ in self.arrays]
        if number.rest is not None:
            return number.near(at.b, at.n, at.t) if number.of_t else number.rest
        zero = jnp.zeros((1, 1), jnp.int32)
        read = (("b", at.b), ("n", at.n), ("t", at.t))
        indices = [x if name in number.depends else zero for name, x in read]
        by_query = [x.shape[1] > 1 for x in indices]

        def near(b: jax.Array, n: jax.Array, t: jax.Array, *arrays: jax.Array) -> jax.Array:
            return number.near(b, n, t, jnp.int32(0), *arrays)

        function = near
        if any(by_query):
            function = jax.vmap(near, (*(0 if x else None for x in by_query), *none))
        inputs = [x if y else lax.squeeze(x, (1,)) for x, y in zip(indices, by_query, strict=True)]
        inputs += [x if x.shape[0] == 1 else jnp.take(x, at.copies, axis=0) for x in self.arrays]
        found = _for_each(function, inputs)
        return found if any(by_query) else lax.expand_dims(found, (1,))

    def _run(self, equal: EqualKeys) -> _Run:
        of_key = mods.xla_array(equal.of_key, self.indices, self.arrays)[:, 0, 0, :]
        wanted = mods.xla_array(equal.of_query, self.indices, self.arrays)[:, 0, :, 0]
        batch = jnp.broadcast_shapes(of_key.shape[:1], wanted.shape[:1])
        wanted = jnp.broadcast_to(wanted, (*batch, wanted.shape[1]))
        of_key = jnp.broadcast_to(of_key, (*batch, self.indices.s.shape[1]))
        first, last, count = EqualRuns.of(of_key).find(wanted)
        is_found = count > 0
        return _Run(of_key, wanted, jnp.where(is_found, first, 0), jnp.where(is_found, last + 1, 0))


def _for_each(function: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
    """`jax.vmap` along the first axis, where arrays of length 1 stand for all."""
    are_shared = [x.shape[0] == 1 for x in arrays]
    inputs = [lax.squeeze(x, (0,)) if y else x for x, y in zip(arrays, are_shared, strict=True)]
    if all(are_shared):
        return lax.expand_dims(function(*inputs), (0,))
    return jax.vmap(function, tuple(None if x else 0 for x in are_shared))(*inputs)


@dataclass(frozen=True)
class _Run:
    """The keys from the first to the last one at which an array equals a number of the query."""

    of_key: jax.Array
    """[1|B, S]."""
    wanted: jax.Array
    """[1|B, 1|T]."""
    first: jax.Array
    """int32 [1|B, 1|T]."""
    end: jax.Array

    def has_others(self, keys: Range) -> jax.Array:
        """bool scalar: among these keys, of some query, are some at which the array differs."""
        begin, end = jnp.broadcast_arrays(*keys)
        shape = (max(begin.shape[0], self.of_key.shape[0]), begin.shape[1])
        begin, end = (jnp.broadcast_to(x, shape) for x in (begin, end))
        length = self.of_key.shape[1]
        values = jnp.broadcast_to(self.of_key, (shape[0], length))
        is_new = values[:, 1:] != values[:, :-1]
        run = jnp.pad(jnp.cumsum(is_new, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))

        def at(x: jax.Array, place: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, jnp.clip(place, 0, length - 1), axis=1)

        is_run = (at(run, begin) == at(run, end - 1)) & (at(values, begin) == self.wanted)
        return ((begin < end) & ~is_run).any()
