"""What a rewrite is: a call that a kernel does not run, said exactly by another that it does."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import jax

from attn_dispatch.call.options import RESIDUALS, TRAINING, Meaning, Promises, Wanted
from attn_dispatch.call.spec import AttentionSpec, Operand

Arrays = dict[str, jax.Array]
"""Operands or results by their names."""

Compute = Callable[[AttentionSpec, Mapping[str, jax.Array]], Arrays]
"""A call computed: its results by name."""

MOST_PAIRS = 2**27
"""An array over pairs of queries and keys that a rewrite makes has at most so many elements."""

LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
_SEQUENCES = (
    "query_segment_ids",
    "key_value_segment_ids",
    "cu_seqlens_q",
    "cu_seqlens_kv",
)
SEQUENCE_OPERANDS = LENGTHS + _SEQUENCES


@dataclass(frozen=True)
class Calls:
    """What a rewrite may have computed."""

    kernel: Compute
    """By the implementation for which the call is rewritten: its `inner` call."""
    xla: Compute
    """Any call, by XLA."""
    beside: Compute
    """By that implementation, the call that `InTwo.beside` asks for."""


class Rewrite(Protocol):
    """One entry of the list, for forward and backward calls."""

    @property
    def name(self) -> str:
        """What it does, for `explain`."""
        ...

    @property
    def moves_dropout(self) -> bool:
        """Whether kernels draw another dropout mask for the inner call."""
        ...

    def inner(self, spec: AttentionSpec) -> AttentionSpec | None:
        """The call that stands in for this one; None where there is nothing to rewrite."""
        ...

    def compute(self, spec: AttentionSpec, operands: Arrays, calls: Calls) -> Arrays:
        """The results of `spec`, at least, by name; of a spec that has an inner one."""
        ...


@runtime_checkable
class InTwo(Rewrite, Protocol):
    """One that may need another call by the same implementation, beside its inner one."""

    def beside(self, spec: AttentionSpec) -> AttentionSpec | None:
        """That call, of a spec that has an inner one; None where it needs none."""
        ...


@runtime_checkable
class ForAnother(Rewrite, Protocol):
    """One that saves nothing itself: the rewrite that can be taken after it does.

    It is taken only where there is a reason against the call.
    """

    def leads_to(self, spec: AttentionSpec) -> AttentionSpec | None:
        """The call that the other one makes, of a spec that has an inner one."""
        ...


@runtime_checkable
class Advising(Rewrite, Protocol):
    """One that knows what a caller can do about a rule that its inner call breaks."""

    def remedies(self, spec: AttentionSpec) -> Mapping[str, str]:
        """Remedies by rule, of a spec that has an inner one: about the arrays of that spec."""
        ...


def changed(
    spec: AttentionSpec,
    *,
    without: tuple[str, ...] = (),
    arrays: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
    meaning: Meaning | None = None,
    wanted: Wanted | None = None,
    promises: Promises | None = None,
    same_lengths: bool | None = None,
) -> AttentionSpec:
    """The call without some operands, with others, and with other options.

    Args:
      spec: the call.
      without: operands that it loses.
      arrays: shape and dtype of operands that are new or others.
      meaning, wanted, promises: in place of the call's. There is never a partner.
      same_lengths: in place of the meaning's; where lengths, ids or cu_seqlens are others, they are
        not the same for both sides unless this says so.
    """
    arrays, meaning = arrays or {}, meaning or spec.meaning
    kept = tuple(x for x in spec.operands if x.name not in without)
    operands = tuple(
        Operand(x.name, *arrays[x.name]) if x.name in arrays else x for x in kept
    ) + tuple(Operand(name, *x) for name, x in arrays.items() if not spec.has(name))
    names = tuple(x.name for x in operands)
    if same_lengths is None:
        has_others = any(name in SEQUENCE_OPERANDS for name in (*without, *arrays))
        same_lengths = meaning.same_lengths and not has_others
    options = replace(
        spec.options,
        operands=names,
        meaning=replace(meaning, same_lengths=same_lengths),
        wanted=replace(wanted or spec.wanted, partner=None),
        promises=promises or spec.promises,
    )
    return AttentionSpec(options, operands)


def keys_as_rows(meaning: Meaning) -> Meaning:
    """For keys and values that a rewrite makes: in memory [B, S, K, ·], as their shape says."""
    return replace(meaning, heads_first_kv=False, value_page=0)


def without_band(meaning: Meaning) -> Meaning:
    """With neither causality nor a static window."""
    return replace(meaning, is_causal=False, window=(None, None))


def gradients_without(spec: AttentionSpec, *names: str) -> tuple[str, ...]:
    """The gradients wanted but for these; the query's where none is left, for nobody.

    XLA drops a kernel whose results nobody uses.
    """
    if not spec.is_backward:
        return ()
    return tuple(x for x in spec.wanted.gradients if x not in names) or ("query",)


def forward_of(spec: AttentionSpec) -> AttentionSpec:
    """The training call that a forward or backward call belongs to, with out and lse as results."""
    return changed(spec, without=RESIDUALS, wanted=TRAINING)


def for_(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> Arrays:
    """Of these arrays, those of the call."""
    return {name: operands[name] for name in spec.options.operands}


_too_large: ContextVar[list[tuple[int, ...]] | None] = ContextVar("too_large", default=None)


def is_affordable(shape: tuple[int, ...]) -> bool:
    """Whether an array over pairs of queries and keys may be made for a call."""
    if math.prod(shape) <= MOST_PAIRS:
        return True
    noted = _too_large.get()
    if noted is not None:
        noted.append(shape)
    return noted is not None


@contextmanager
def at_any_size() -> Generator[list[tuple[int, ...]]]:
    """Rewrites make arrays of any size here, for nobody: the list has those beyond the limit."""
    noted: list[tuple[int, ...]] = []
    before = _too_large.set(noted)
    try:
        yield noted
    finally:
        _too_large.reset(before)


def common_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that arrays of these shapes make together; an axis of 1 is shared."""
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))
