"""What a rewrite is: a record by which another call, its inner call, stands in for a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import jax

from attn_dispatch.call.options import RESIDUALS, TRAINING, Meaning, Promises, Wanted
from attn_dispatch.call.spec import AttentionSpec, Operand

Arrays = dict[str, jax.Array]
"""Operands or results by their names."""

Shape = tuple[int, ...]
Arrangement = Mapping[str, tuple[Shape, str]]
"""Shapes and dtypes of operands by their names."""

Axis = Literal["batch", "heads"]

Compute = Callable[[AttentionSpec, Mapping[str, jax.Array]], Arrays]
"""A call computed: its results by name."""

MAX_PAIR_ENTRIES = 2**27
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
class Parts:
    """Equal parts of a call along an axis, of which the last one of a batch may be smaller."""

    axis: Axis
    size: int
    """Batch rows, or query heads, of a part."""


@dataclass(frozen=True)
class Calls:
    """What the computation of a rewrite may call."""

    kernel: Compute
    """The inner call, by the implementation for which the call is rewritten."""
    xla: Compute
    """Any call, by XLA."""
    beside: Compute
    """The call `Rewrite.beside`, by that implementation."""


@dataclass(frozen=True)
class AskedOf:
    """The calls about which a rewrite is asked. It leaves all others as they are."""

    operands: tuple[str, ...] = ()
    """The call has one of these operands; () for any call."""
    direction: Literal["forward", "backward", "both"] = "both"

    def includes(self, names: Iterable[str], *, is_backward: bool) -> bool:
        """Whether a call with operands of these names is one of them."""
        if self.direction != "both" and is_backward != (self.direction == "backward"):
            return False
        return not self.operands or not set(self.operands).isdisjoint(names)


EVERY_CALL = AskedOf()
CACHE = AskedOf(("page_table", "key_value_seq_lengths"), "forward")
"""Calls on a cache of keys and values, which has pages or says how many keys each row has."""
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
    """What it does, for `explain`."""
    inner: Callable[[AttentionSpec], AttentionSpec]
    """The call that a kernel runs in the place of this one."""
    compute: Callable[[AttentionSpec, AttentionSpec, Arrays, Calls], Arrays]
    """The results of a call by name, at least, given the call, its inner call and the operands."""
    asked_of: AskedOf = EVERY_CALL
    when: Callable[[AttentionSpec], bool] = _always
    """Whether the call, one of `asked_of`, has an inner call."""
    pairs: Callable[[AttentionSpec], tuple[Shape, ...]] = _no_arrays
    """Shapes of arrays that it makes, over pairs of queries and keys for example, which grow faster
    than the call's own: each has at most MAX_PAIR_ENTRIES elements."""
    beside: Callable[[AttentionSpec], AttentionSpec | None] = _nothing
    """Another call that the same implementation must run beside the inner call."""
    adds: tuple[str, ...] = ()
    """Operands that the inner call may have and the call has not: it enables the rewrites that are
    asked of them."""
    enables: Rewrite | None = None
    """The rewrite for which alone this one is taken: that one must apply to the inner call, and
    something must speak against the call."""
    remedies: Callable[[AttentionSpec], Mapping[str, str]] = _no_remedies
    """What a caller can do about rules that the inner call breaks, by rule."""
    own_bytes: Callable[[AttentionSpec], int] = _no_bytes
    """The scratch memory that it takes beside that of the inner call."""
    parts: Parts | None = None
    """The parts into which it divides the call, if it does."""
    moves_dropout: bool = False
    """Whether kernels draw another dropout mask for the inner call."""
    may_fall_back: bool = False
    """Whether it is decided when the call runs that XLA computes it after all. Such a rewrite is
    taken of the call as it was made, and not after others."""
    reads_lse: bool = False
    """Whether its backward pass reads the call's own lse, so that it must come before sinks, which
    are in lse, are left out."""
    needed_for: str = ""
    """A case of the conformance suite that needs it, where no call of docs/models.md does."""

    def __str__(self) -> str:
        return self.name

    def applied(self, spec: AttentionSpec) -> AttentionSpec | None:
        """The inner call of a call; None where the rewrite does not apply."""
        if not self._applies(spec) or not all(map(is_affordable, self.pairs(spec))):
            return None
        inner = self.inner(spec)
        if self.enables is not None and self.enables.applied(inner) is None:
            return None
        return inner

    def too_large(self, spec: AttentionSpec) -> Shape | None:
        """The shape of the first array for which it does not apply, because that is too large."""
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
    arrays: Arrangement | None = None,
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


def is_affordable(shape: Shape) -> bool:
    """Whether an array over pairs of queries and keys may be made for a call."""
    return math.prod(shape) <= MAX_PAIR_ENTRIES


def common_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that arrays of these shapes make together; an axis of 1 is shared."""
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))
