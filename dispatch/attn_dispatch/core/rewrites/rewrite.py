"""A rewrite: a record that says how another call, the inner call, replaces a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import jax

from attn_dispatch.call.operands import Operand, resized, with_role
from attn_dispatch.call.options import RESIDUALS, TRAINING, Meaning, Promises, Wanted
from attn_dispatch.call.spec import AttentionSpec

NamedArrays = dict[str, jax.Array]
"""Operands or results by their names."""

Shape = tuple[int, ...]
Arrangement = Mapping[str, tuple[Shape, str]]
"""Shapes and dtypes of operands by their names."""

Axis = Literal["batch", "heads"]

Compute = Callable[[AttentionSpec, Mapping[str, jax.Array]], NamedArrays]
"""A function that computes a call: from its spec and its operands to its results by name."""

KernelCompute = Callable[[Mapping[str, jax.Array]], NamedArrays]
"""A function that computes one given call: from its operands to its results by name."""

MAX_PAIR_ENTRIES = 2**27
"""The most elements of an array over pairs of queries and keys that a rewrite may make."""

LENGTHS = with_role("length")
SEQUENCE_OPERANDS = with_role("sequence")

UNSEEN: Mapping[str, float | bool] = {"lse": -math.inf, "row_max": -math.inf, "keep": True}
"""The results of queries that see no key, where they are not 0."""


@dataclass(frozen=True)
class Parts:
    """Equal parts of a call along an axis. Along the batch, the last part may be smaller."""

    axis: Axis
    size: int
    """The number of batch rows, or of query heads, in a part."""


@dataclass(frozen=True)
class Calls:
    """The functions that a rewrite's `compute` may use."""

    kernel: KernelCompute
    """Computes the inner call with the implementation that the call is rewritten for."""
    xla: Compute
    """Computes any call with XLA."""
    beside: Compute
    """Computes the call `Rewrite.beside` with that same implementation."""


@dataclass(frozen=True)
class AskedOf:
    """The calls that a rewrite is tried on. It never applies to any other call."""

    operands: tuple[str, ...] = ()
    """The call has at least one of these operands. () includes every call."""
    direction: Literal["forward", "backward", "both"] = "both"

    def includes(self, names: Iterable[str], *, is_backward: bool) -> bool:
        """Whether a call of this direction, with operands of these names, is one of them."""
        if self.direction != "both" and is_backward != (self.direction == "backward"):
            return False
        return not self.operands or not set(self.operands).isdisjoint(names)


EVERY_CALL = AskedOf()
CACHE = AskedOf(("page_table", "key_value_seq_lengths"), "forward")
"""Forward calls on a cache of keys and values: one in pages, or with a length for each row."""
PAGES = AskedOf(("page_table",), "forward")
BACKWARD = AskedOf(direction="backward")
MODS = AskedOf(("mods_start",))
"""Calls with a score_mod or a mask_mod."""
SEQUENCES = AskedOf(SEQUENCE_OPERANDS)


def _always(spec: AttentionSpec) -> bool:
    return True


def _nothing(spec: AttentionSpec) -> None:
    return None


def _no_arrays(spec: AttentionSpec) -> tuple[Shape, ...]:
    return ()


def _no_bytes(spec: AttentionSpec) -> int:
    return 0


def _no_remedies(spec: AttentionSpec) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Rewrite:
    """One way to replace a call, forward or backward, by an inner call with the same results.

    All functions but `when` are called only where the rewrite applies.
    """

    name: str
    """What the rewrite does, in the words that `explain` prints."""
    inner: Callable[[AttentionSpec], AttentionSpec]
    """Returns the inner call, which a kernel runs in place of the call."""
    compute: Callable[[AttentionSpec, AttentionSpec, NamedArrays, Calls], NamedArrays]
    """Computes the results by name from the call, its inner call and the operands. It may return
    results that the call does not want, too."""
    asked_of: AskedOf = EVERY_CALL
    when: Callable[[AttentionSpec], bool] = _always
    """Whether the rewrite applies to a call that `asked_of` includes."""
    pairs: Callable[[AttentionSpec], tuple[Shape, ...]] = _no_arrays
    """Shapes of the large arrays that the rewrite makes, for example over pairs of queries and
    keys. The rewrite does not apply if one of them has more than MAX_PAIR_ENTRIES elements."""
    beside: Callable[[AttentionSpec], AttentionSpec | None] = _nothing
    """Another call that the same implementation must run in addition to the inner call."""
    adds: tuple[str, ...] = ()
    """Operands that the inner call may have although the call does not. Rewrites of calls with
    these operands may apply after this one."""
    enables: Rewrite | None = None
    """The rewrite that this one prepares for, if it has no use by itself. This one applies only if
    that one applies to its inner call, and is taken only if the call breaks a rule."""
    remedies: Callable[[AttentionSpec], Mapping[str, str]] = _no_remedies
    """What a caller can do about a rule that the inner call breaks, by the name of the rule."""
    own_bytes: Callable[[AttentionSpec], int] = _no_bytes
    """Bytes of scratch memory that the rewrite takes in addition to the inner call's."""
    parts: Parts | None = None
    """The parts, if the rewrite divides the call into some."""
    is_constant: bool = False
    """Whether the results are constants: the inner call is only asked about, and never runs."""
    moves_dropout: bool = False
    """Whether kernels draw another dropout mask for the inner call than for the call."""
    may_fall_back: bool = False
    """Whether the program decides when it runs that XLA computes the call instead. Such a rewrite
    applies only to the call as the caller made it, never after another rewrite."""
    reads_lse: bool = False
    """Whether the backward pass of the rewrite reads the call's own lse. A sink is part of that
    lse, so such a rewrite must precede the one that removes sinks."""
    needed_for: str = ""
    """A case of the conformance suite or of tests/support/rewrite_cases.py that needs the
    rewrite, if no call of a real model (tests/results/models.json) does."""

    def __str__(self) -> str:
        return self.name

    def applied(self, spec: AttentionSpec) -> AttentionSpec | None:
        """The inner call; None if the rewrite does not apply to the call."""
        found = self.inner_calls(spec)
        return found[0] if found else None

    def inner_calls(self, spec: AttentionSpec) -> tuple[AttentionSpec, ...]:
        """The inner call, then the inner call of the rewrite that this one `enables`, if any.

        Empty if the rewrite does not apply to the call.
        """
        if not self._applies(spec) or not all(map(is_affordable, self.pairs(spec))):
            return ()
        inner = self.inner(spec)
        if self.enables is None:
            return (inner,)
        enabled = self.enables.inner_calls(inner)
        return (inner, *enabled) if enabled else ()

    def too_large(self, spec: AttentionSpec) -> Shape | None:
        """The first shape of `pairs` that is too large, if nothing else keeps the rewrite from
        applying to the call; else None."""
        if not self._applies(spec):
            return None
        return next((x for x in self.pairs(spec) if not is_affordable(x)), None)

    def _applies(self, spec: AttentionSpec) -> bool:
        is_asked = self.asked_of.includes(spec.options.operands, is_backward=spec.is_backward)
        return is_asked and self.when(spec)


def changed(
    spec: AttentionSpec,
    *,
    without: tuple[str, ...] = (),
    sizes: Mapping[str, int] | None = None,
    made: tuple[str, ...] = (),
    arrays: Arrangement | None = None,
    meaning: Meaning | None = None,
    wanted: Wanted | None = None,
    promises: Promises | None = None,
    same_lengths: bool | None = None,
) -> AttentionSpec:
    """The call with some operands removed, added or replaced, and with other options.

    Args:
      spec: the call. The result never has its partner.
      without: names of the operands to remove.
      sizes: new sizes of axes, by their letters in the table of operands. They change the shapes of
        all operands with such an axis. A shared axis keeps the size 1.
      made: names of operands to add, or to make anew, with the axes and dtype that the table has.
      arrays: shape and dtype of each other operand to add, or to replace.
      meaning, wanted, promises: replace the call's if given.
      same_lengths: whether queries and keys have the same lengths. By default this stays as it is,
        but becomes False if lengths, segment ids or cu_seqlens are removed, added or replaced.
    """
    meaning = meaning or spec.meaning
    found = {x.name: x for x in spec.operands if x.name not in without}
    if sizes:
        found = {x: replace(y, shape=resized(x, y.shape, sizes)) for x, y in found.items()}
    found |= {x: spec.made(x, sizes) for x in made}
    found |= {x: Operand(x, *y) for x, y in (arrays or {}).items()}
    operands = tuple(found.values())
    if same_lengths is None:
        resized_names = (x.name for x in {*operands} - {*spec.operands})
        others = {*without, *made, *(arrays or ()), *resized_names}
        same_lengths = meaning.same_lengths and others.isdisjoint(SEQUENCE_OPERANDS)
    options = replace(
        spec.options,
        operands=tuple(found),
        meaning=replace(meaning, same_lengths=same_lengths),
        wanted=replace(wanted or spec.wanted, partner=None),
        promises=promises or spec.promises,
    )
    return AttentionSpec(options, operands)


def keys_as_rows(meaning: Meaning) -> Meaning:
    """The meaning for keys and values that a rewrite makes, which lie in memory as [B, S, K, ·]."""
    return replace(meaning, heads_first_kv=False, value_page=0)


def without_band(meaning: Meaning) -> Meaning:
    """The meaning without causality and without a static window."""
    return replace(meaning, is_causal=False, window=(None, None))


def without_offset(spec: AttentionSpec) -> AttentionSpec:
    """The call without its offset, and without a band that hides nothing; the call itself if it has
    no offset, or if anything counts from it."""
    if spec.meaning.causal_alignment != "by_offset" or spec.has_diagonal:
        return spec
    meaning = replace(without_band(spec.meaning), causal_alignment="top_left", causal_offset=0)
    return changed(spec, without=("causal_offset",), meaning=meaning)


def gradients_without(spec: AttentionSpec, *names: str) -> tuple[str, ...]:
    """The wanted gradients except these; the query's if none is left.

    A backward call needs at least one. If nothing uses that one, XLA removes the kernel.
    """
    if not spec.is_backward:
        return ()
    return tuple(x for x in spec.wanted.gradients if x not in names) or ("query",)


def forward_of(spec: AttentionSpec) -> AttentionSpec:
    """The training call that a forward or backward call belongs to, with out and lse as results."""
    return changed(spec, without=RESIDUALS, wanted=TRAINING)


def for_(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> NamedArrays:
    """The arrays that are operands of the call."""
    return {name: operands[name] for name in spec.options.operands}


def is_affordable(shape: Shape) -> bool:
    """Whether a rewrite may make an array of this shape: at most MAX_PAIR_ENTRIES elements."""
    return math.prod(shape) <= MAX_PAIR_ENTRIES


def common_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which arrays of these shapes, alike except for axes of 1, broadcast."""
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))
