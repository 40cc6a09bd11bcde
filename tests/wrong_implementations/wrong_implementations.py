"""Wrong implementations of attention: the mistakes that the conformance suite must notice.

Each is a small function around the right implementation, planted where every implementation
stands: at forward(spec, device, operands) and backward(spec, device, operands). It is handed a
`Call`, calls the right implementation with other options or other operands, or changes what that
returns, and knows nothing of how XLA computes it.

Where a mistake is in the scores, or in who may attend, the function computes those itself, densely,
and hands them in as a bias or as a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from attn_dispatch import xla
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.devices.device import Device
from attn_dispatch.programs.tracing import trace
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.drawn_mods import reads_of
from tests.support.option_parts import with_facts

Array = jax.Array
Results = dict[str, Array]
Needs = Callable[[Case], Any]


@dataclass(frozen=True)
class Call:
    """One attention call as an implementation is handed it, and the right answer to it."""

    spec: AttentionSpec
    device: Device
    operands: Mapping[str, Array]

    @property
    def is_backward(self) -> bool:
        return self.spec.is_backward

    def right(self, changed: Mapping[str, Array | None] | None = None, **options: Any) -> Results:
        """The right results by name, of the call with these operands and options changed.

        An operand that is changed to None is left out.
        """
        operands = {**self.operands, **(changed or {})}
        operands = {name: x for name, x in operands.items() if x is not None}
        facts = with_facts(self.spec.options, operands=tuple(operands), **options)
        spec = AttentionSpec.of(list(operands.values()), facts)
        compute = xla.backward if spec.is_backward else xla.forward
        return dict(zip(spec.result_names, compute(spec, self.device, operands), strict=True))

    def __getitem__(self, name: str) -> Array:
        return self.operands[name]

    def __contains__(self, name: str) -> bool:
        return name in self.operands

    @property
    def options(self) -> Any:
        return self.spec.options


@dataclass
class Wrong:
    """A wrong implementation; `select` may take it for any other while it is `installed`."""

    name: str
    """"group/what is wrong"; also the implementation's name."""
    says: str
    """What is wrong, in one sentence."""
    needs: Needs
    """Whether the mistake can show in a case: what cannot is not worth compiling."""
    mistake: Callable[[Call], Results]
    directions: tuple[str, ...]
    calls: int = field(default=0)
    """How many calls the mistake was made in."""

    PLATFORM = None

    @property
    def NAME(self) -> str:
        return self.name

    def __getattr__(self, name: str) -> Any:
        return getattr(xla, name)  # in all but its results it is XLA

    def forward(
        self, spec: AttentionSpec, device: Device, operands: Mapping[str, Array]
    ) -> tuple[Array, ...]:
        return self._compute("forward", Call(spec, device, operands))

    def backward(
        self, spec: AttentionSpec, device: Device, operands: Mapping[str, Array]
    ) -> tuple[Array, ...]:
        return self._compute("backward", Call(spec, device, operands))

    def applies_to(self, case: Case) -> bool:
        """Whether the mistake can show in this case."""
        if self.directions == ("backward",) and case.inference:
            return False
        return bool(self.needs(case))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Among the implementations.

        Its name is in the options of every call that asks for it, and no other implementation has
        that name: whatever JAX remembers of other calls is of no use to these.
        """
        others = select.IMPLEMENTATIONS
        select.IMPLEMENTATIONS = (*others, self)
        try:
            yield
        finally:
            select.IMPLEMENTATIONS = others

    def _compute(self, direction: str, call: Call) -> tuple[Array, ...]:
        spec = call.spec
        if direction not in self.directions or spec.is_empty:
            results = call.right()
        else:
            self.calls += 1
            results = self.mistake(call)
        found = zip(spec.result_names, spec.results, strict=True)
        return tuple(results[name].reshape(x.shape).astype(x.dtype) for name, x in found)


WRONG: dict[str, Wrong] = {}
"""All of them by name, in the order below."""

_BOTH = ("forward", "backward")


def wrong(
    group: str, needs: Needs, *directions: str
) -> Callable[[Callable[[Call], Results]], Callable[[Call], Results]]:
    """Enters a function as a wrong implementation: its name, and its docstring's first line.

    Without `directions` the mistake is made in both; elsewhere the right implementation computes.
    """

    def enter(mistake: Callable[[Call], Results]) -> Callable[[Call], Results]:
        name = f"{group}/{mistake.__name__}"
        assert name not in WRONG and mistake.__doc__
        WRONG[name] = Wrong(name, mistake.__doc__, needs, mistake, directions or _BOTH)
        return mistake

    return enter


# What cases have.


def has_band(c: Case) -> bool:
    return c.is_causal or c.window != (None, None)


def is_packed(c: Case) -> bool:
    return c.q_segments is not None or c.cu_q is not None


def has_lengths(c: Case) -> bool:
    return c.q_lengths is not None or c.kv_lengths is not None


def is_plain(c: Case) -> bool:
    """One sequence in every batch row."""
    return not is_packed(c)


def returns_lse(c: Case) -> bool:
    return bool(c.lse_grad or c.needs_max or not (c.inference or c.dropout))


def pads_keys(c: Case) -> bool:
    lengths, rows = c.kv_lengths or (), c.kv_segments or ()
    return min(lengths, default=c.s) < c.s or 0 in chain(*rows) or _ends_early(c.cu_kv, c.s)


def pads_queries(c: Case) -> bool:
    lengths, rows = c.q_lengths or (), c.q_segments or ()
    return min(lengths, default=c.t) < c.t or 0 in chain(*rows) or _ends_early(c.cu_q, c.t)


def _ends_early(cu_seqlens: Any, length: int) -> bool:
    return cu_seqlens is not None and any(row[-1] < length for row in cu_seqlens)


def tile(length: int) -> int:
    """The rows or keys in a tile, so that small sizes have some as well."""
    return 64 if length > 64 else 4


def has_rest(length: int) -> bool:
    """Whether the last of several tiles is not a whole one."""
    return length > tile(length) and length % tile(length) != 0


def whole_tiles(length: int) -> int:
    return length // tile(length) * tile(length)


# What mistakes are made of.


def clean(x: Array) -> Array:
    """x with 0 for the NaN in padding, wide."""
    return jnp.where(jnp.isnan(x), 0, x).astype(jnp.promote_types(x.dtype, jnp.float32))


def groups(call: Call) -> int:
    return call.spec.num_heads // call.spec.num_kv_heads


def raw_scores(call: Call) -> Array:
    """scale · query · key, wide [B, N, T, S]."""
    key = jnp.repeat(clean(call["key"]), groups(call), axis=2)
    return call.options.meaning.scale * jnp.einsum("btnh,bsnh->bnts", clean(call["query"]), key)


def bias_of(call: Call) -> Array:
    return call["bias"].astype(jnp.float32) if "bias" in call else jnp.zeros((1, 1, 1, 1))


def slopes_of(call: Call) -> Array:
    """[1|B, N, 1, 1]."""
    return call["alibi_slopes"][:, :, None, None]


def lengths_of(call: Call, name: str, full: int) -> Array:
    if name not in call:
        return jnp.full((call.spec.batch, 1, 1, 1), full)
    return jnp.clip(call[name], 0, full)[:, None, None, None]


def distances(call: Call, *, is_aligned: bool = True) -> Array:
    """i + offset - j in a row that is one sequence, [B, 1, T, S]; the offset is 0 if not aligned.

    In rows of several: as if each were one.
    """
    t, s = call.spec.seq_len_q, call.spec.seq_len_kv
    offset: Array | int = 0
    if is_aligned and call.options.meaning.causal_alignment == "bottom_right":
        queries = lengths_of(call, "query_seq_lengths", t)
        offset = lengths_of(call, "key_value_seq_lengths", s) - queries
    rows = jnp.arange(t)[:, None] - jnp.arange(s)[None, :]
    return jnp.broadcast_to(rows + offset, (call.spec.batch, 1, t, s))


def within_band(call: Call, distance: Array) -> Array:
    """The window and causality, of pairs this far apart."""
    left, right = call.spec.band
    may = jnp.ones_like(distance, bool)
    may &= True if left is None else distance <= left
    return may & (True if right is None else distance >= -right)


def masked_by(call: Call, mask: Array, **options: Any) -> Results:
    """The call with one mask more."""
    return call.right({"mask": call["mask"] & mask if "mask" in call else mask}, **options)


def banded_by(call: Call, distance: Array) -> Results:
    """The call whose window and causality go by these distances instead."""
    may = within_band(call, distance)
    return masked_by(call, may, is_causal=False, window=(None, None))


def capped_as(call: Call, score: Array) -> Results:
    """The call with these dense scores, before the mask, in place of its own."""
    changed = {"alibi_slopes": None, "bias": score - raw_scores(call)}
    return call.right(changed, logits_soft_cap=None)


def soft_capped(call: Call, score: Array) -> Array:
    cap = call.options.meaning.logits_soft_cap
    return score if cap is None else cap * jnp.tanh(score / cap)


def alibi_of(call: Call) -> Array:
    if "alibi_slopes" not in call:
        return jnp.zeros((1, 1, 1, 1))
    return -slopes_of(call) * jnp.abs(distances(call))


def of_first(x: Array, axis: int = 0) -> Array:
    """x with what stands first along an axis in all its places."""
    return jnp.broadcast_to(jnp.take(x, jnp.array([0]), axis=axis), x.shape)


def misread(x: Array) -> Array:
    """x [..., T, S] whose memory is taken for that of [..., S, T], transposed."""
    *batch, t, s = x.shape
    return x.reshape(*batch, s, t).swapaxes(-1, -2)


def rows_of(call: Call, keep: Array) -> dict[str, Array | None]:
    """The cotangents, 0 but for these rows and heads: bool [1|B, T|1, N|1]."""
    changed: dict[str, Array | None] = {
        "out_grad": jnp.where(keep[..., None], call["out_grad"], 0),
    }
    if "lse_grad" in call:
        changed["lse_grad"] = jnp.where(keep.swapaxes(1, 2), call["lse_grad"], 0)
    return changed


def without_dropout(call: Call) -> Results:
    return call.right({"dropout_key": None}, dropout_rate=0.0)


def times(results: Results, name: str, factor: float) -> Results:
    """The results, one of them multiplied if it is there."""
    return results | ({name: results[name] * factor} if name in results else {})


def mantissa(x: Array, bits: int) -> Array:
    """x rounded to that many bits after the leading one."""
    wide = x.astype(jnp.float32)
    fraction, exponent = jnp.frexp(wide)
    rounded = jnp.ldexp(jnp.round(fraction * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)
    return jnp.where(jnp.isfinite(wide), rounded, wide).astype(x.dtype)


# Masks and windows.


@wrong("masks", lambda c: c.window[0] is not None)
def window_reaches_one_further_left(call):
    """A query sees one key more on the left of its window."""
    left, right = call.options.meaning.window
    return call.right(window=(left + 1, right))


@wrong("masks", lambda c: (c.window[0] or 0) > 0)
def window_reaches_one_less_left(call):
    """A query sees one key less on the left of its window."""
    left, right = call.options.meaning.window
    return call.right(window=(left - 1, right))


@wrong("masks", lambda c: c.window[1] is not None and not c.is_causal)
def window_reaches_one_further_right(call):
    """A query sees one key more on the right of its window."""
    left, right = call.options.meaning.window
    return call.right(window=(left, right + 1))


@wrong("masks", lambda c: not c.is_causal and c.window[0] != c.window[1])
def window_sides_swapped(call):
    """The window's left and right are taken for each other."""
    return call.right(window=call.options.meaning.window[::-1])


@wrong("masks", lambda c: c.is_causal and c.window[0] is not None)
def window_forgotten_where_causal(call):
    """A causal call sees all the past, whatever its window."""
    return call.right(window=(None, None))


@wrong("masks", lambda c: c.is_causal and c.s > 1)
def causal_sees_the_next_key(call):
    """The causal diagonal is one key too far to the right."""
    return call.right(is_causal=False, window=(call.options.meaning.window[0], 1))


@wrong("masks", lambda c: c.is_causal and is_plain(c))
def causal_hides_the_own_key(call):
    """A causal query does not see the key on its diagonal."""
    return masked_by(call, distances(call) > 0)


@wrong("masks", lambda c: c.alignment == "bottom_right" and has_band(c))
def alignment_ignored(call):
    """The diagonal starts at the top left even where it should end at the bottom right."""
    return call.right(causal_alignment="top_left")


@wrong(
    "masks",
    lambda c: c.alignment == "bottom_right" and has_band(c) and has_lengths(c) and is_plain(c),
)
def bottom_right_of_the_arrays(call):
    """The diagonal ends at the corner of the arrays, not at that of the sequences' lengths."""
    offset = call.spec.seq_len_kv - call.spec.seq_len_q
    return banded_by(call, distances(call, is_aligned=False) + offset)


@wrong("masks", lambda c: c.alignment == "top_left" and has_band(c) and is_packed(c))
def band_counted_from_the_rows_start(call):
    """The diagonal of a packed sequence starts where the row does, not where the sequence does."""
    return banded_by(call, distances(call))


@wrong("masks", lambda c: c.mask and c.mask[2] > 1 and c.mask[3] > 1)
def mask_transposed(call):
    """The mask's queries and keys are taken for each other."""
    return call.right({"mask": misread(call["mask"])})


@wrong("masks", lambda c: c.mask)
def mask_inverted_in_the_last_head(call):
    """In the last head the mask says who may not attend."""
    b, _, t, s = call["mask"].shape
    mask = jnp.broadcast_to(call["mask"], (b, call.spec.num_heads, t, s))
    return call.right({"mask": mask.at[:, -1].set(~mask[:, -1])})


@wrong("masks", lambda c: c.mask and c.mask[3] > 1)
def mask_ignored_for_the_last_key(call):
    """Whatever the mask says, all may attend to the last key."""
    return call.right({"mask": call["mask"].at[..., -1].set(True)})


@wrong("masks", lambda c: c.mask and c.mask[2] > 1)
def mask_of_the_row_before_for_the_last_query(call):
    """The last query goes by the mask of the one before it."""
    mask = call["mask"]
    return call.right({"mask": mask.at[:, :, -1].set(mask[:, :, -2])})


@wrong("masks", lambda c: c.mask and c.mask[0] > 1)
def mask_of_the_first_batch_row(call):
    """All batch rows go by the mask of the first."""
    return call.right({"mask": of_first(call["mask"])})


@wrong("masks", lambda c: c.mask and c.mask[1] > 1)
def mask_of_the_first_head(call):
    """All heads go by the mask of the first."""
    return call.right({"mask": of_first(call["mask"], axis=1)})


@wrong("masks", lambda c: c.mask and c.is_causal)
def causal_forgotten_beside_a_mask(call):
    """A call with a mask is not causal any more."""
    return call.right(is_causal=False)


# Segments and lengths.


@wrong("segments", lambda c: c.q_segments)
def last_segment_dropped(call):
    """The queries of a row's last segment are taken for padding."""
    ids = call["query_segment_ids"]
    return call.right({"query_segment_ids": jnp.where(ids == ids.max(axis=1)[:, None], 0, ids)})


@wrong("segments", lambda c: c.q_segments)
def segments_not_separated(call):
    """All segments of a row are one."""
    names = ("query_segment_ids", "key_value_segment_ids")
    return call.right({name: jnp.minimum(call[name], 1) for name in names})


@wrong("segments", lambda c: c.q_segments and pads_queries(c) and pads_keys(c))
def padding_is_a_segment(call):
    """Padding attends to padding, as if 0 were a segment like the others."""
    most = call.options.meaning.max_segments
    names = ("query_segment_ids", "key_value_segment_ids")
    changed = {name: call[name] + 1 for name in names}
    return call.right(changed, max_segments=None if most is None else most + 1)


@wrong("segments", lambda c: c.max_segments and max(chain(*c.q_segments)) > c.max_segments)
def segments_past_the_largest_are_kept(call):
    """Segments with an id larger than max_segments are not taken for padding."""
    return call.right(max_segments=None)


@wrong("segments", lambda c: c.q_segments and c.b > 1)
def segments_of_the_first_batch_row(call):
    """All batch rows have the segments of the first one's keys."""
    return call.right({"key_value_segment_ids": of_first(call["key_value_segment_ids"])})


@wrong("segments", lambda c: c.cu_q)
def last_sequence_dropped(call):
    """The queries of the last of several packed sequences are taken for padding."""
    starts = call["cu_seqlens_q"]
    return call.right({"cu_seqlens_q": starts.at[:, -1].set(starts[:, -2])})


@wrong("segments", lambda c: c.cu_kv and len(c.cu_kv[0]) > 2)
def sequences_of_keys_start_one_late(call):
    """Every packed sequence of keys but the first starts one key late."""
    starts = call["cu_seqlens_kv"]
    late = jnp.minimum(starts.at[:, 1:-1].add(1), starts[:, -1:])
    return call.right({"cu_seqlens_kv": late})


@wrong("segments", lambda c: c.cu_kv and c.b > 1)
def sequences_of_the_first_batch_row(call):
    """All batch rows have the packed sequences of the first one's keys."""
    return call.right({"cu_seqlens_kv": of_first(call["cu_seqlens_kv"])})


@wrong("segments", lambda c: min(c.kv_lengths or (c.s,)) < c.s)
def key_length_one_too_long(call):
    """A query sees one key of the padding."""
    lengths = jnp.minimum(call["key_value_seq_lengths"] + 1, call.spec.seq_len_kv)
    return call.right({"key_value_seq_lengths": lengths})


@wrong("segments", lambda c: max(c.kv_lengths or (0,)) > 0)
def key_length_one_too_short(call):
    """No query sees the last key of a sequence that is padded."""
    lengths = jnp.maximum(call["key_value_seq_lengths"] - 1, 0)
    return call.right({"key_value_seq_lengths": lengths})


@wrong("segments", lambda c: max(c.kv_lengths or (0,)) > c.s)
def key_length_past_the_array_is_none(call):
    """A length that is larger than the array is taken for 0, where it means all of the array."""
    lengths = call["key_value_seq_lengths"]
    lengths = jnp.where(lengths > call.spec.seq_len_kv, 0, lengths)
    return call.right({"key_value_seq_lengths": lengths})


@wrong("segments", lambda c: c.kv_lengths and len(set(c.kv_lengths)) > 1)
def key_lengths_of_the_first_batch_row(call):
    """All batch rows have as many keys as the first."""
    return call.right({"key_value_seq_lengths": of_first(call["key_value_seq_lengths"])})


@wrong("segments", lambda c: min(c.q_lengths or (c.t,)) < c.t)
def query_lengths_ignored(call):
    """Queries of the padding are computed like the others."""
    return call.right({"query_seq_lengths": None})


@wrong("segments", lambda c: min(c.q_lengths or (c.t,)) < c.t, "forward")
def padding_queries_not_zeroed(call):
    """In the padding of the queries stands the output of the first query."""
    results = call.right()
    is_real = jnp.arange(call.spec.seq_len_q) < call["query_seq_lengths"][:, None]
    out = jnp.where(is_real[..., None, None], results["out"], results["out"][:, :1])
    return results | {"out": out}


@wrong("segments", lambda c: min(c.q_lengths or (c.t,)) < c.t, "backward")
def gradient_left_in_padding_queries(call):
    """In the padding of the queries something very small is left in their gradient."""
    results = call.right()
    if "query" not in results:
        return results
    is_real = jnp.arange(call.spec.seq_len_q) < call["query_seq_lengths"][:, None]
    return results | {"query": jnp.where(is_real[..., None, None], results["query"], 1e-6)}


@wrong("segments", pads_keys, "forward")
def nan_of_padding_keys_let_through(call):
    """Keys of the padding are multiplied by 0, which NaN survives."""
    results = call.right()
    nothing = 0 * call["key"].sum(axis=(1, 2, 3))[:, None, None, None]
    return results | {"out": results["out"] + nothing}


@wrong("segments", pads_queries, "backward")
def nan_of_padding_queries_let_through(call):
    """Queries of the padding are multiplied by 0 on their way into the gradient of key."""
    results = call.right()
    nothing = 0 * call["query"].sum(axis=(1, 2, 3))[:, None, None, None]
    return results | ({"key": results["key"] + nothing} if "key" in results else {})


@wrong("segments", lambda c: 0 in (c.kv_lengths or ()) and returns_lse(c), "forward")
def lse_of_an_empty_sequence_is_zero(call):
    """Where a sequence has no keys at all, lse is 0."""
    results = call.right(needs_lse=True)
    is_empty = call["key_value_seq_lengths"] == 0
    return results | {"lse": jnp.where(is_empty[:, None, None], 0, results["lse"])}


@wrong("segments", lambda c: 0 in (c.kv_lengths or ()), "forward")
def empty_sequence_is_divided_by_zero(call):
    """Where a sequence has no keys at all, its output is 0 / 0."""
    results = call.right()
    is_empty = (call["key_value_seq_lengths"] == 0)[:, None, None, None]
    return results | {"out": jnp.where(is_empty, jnp.nan, results["out"])}


@wrong("segments", lambda c: c.dead_rows or c.infinite_bias or 0 in (c.kv_lengths or ()), "forward")
def queries_without_keys_take_the_mean(call):
    """A query that may attend to nothing attends to everything a little, as with scores of -1e9."""
    results = call.right(needs_lse=True)
    mean = jnp.repeat(clean(call["value"]).mean(axis=1), groups(call), axis=1)
    is_dead = (results["lse"] == -jnp.inf).swapaxes(1, 2)[..., None]
    return results | {"out": jnp.where(is_dead, mean[:, None], results["out"])}


# Heads.


@wrong("heads", lambda c: c.k > 1)
def kv_heads_swapped(call):
    """The key heads are in the opposite order."""
    return call.right({name: call[name][:, :, ::-1] for name in ("key", "value")})


@wrong("heads", lambda c: 1 < c.k < c.n, "forward")
def kv_heads_interleaved(call):
    """Query head n takes key head n % K, where n // G is right."""
    heads = jnp.arange(call.spec.num_heads) % call.spec.num_kv_heads
    return call.right({name: call[name][:, :, heads] for name in ("key", "value")})


@wrong("heads", lambda c: c.k > 1, "forward")
def values_of_the_next_head(call):
    """Each key head takes the values of the next one."""
    return call.right({"value": jnp.roll(call["value"], -1, axis=2)})


@wrong("heads", lambda c: c.k < c.n, "backward")
def key_gradient_averaged_over_the_group(call):
    """The gradient of a key is the mean over the heads that share it, where it is their sum."""
    return times(call.right(), "key", 1 / groups(call))


@wrong("heads", lambda c: c.k < c.n, "backward")
def key_gradient_of_the_groups_first_head(call):
    """The gradient of a key is that of the first head alone that shares it."""
    is_first = jnp.arange(call.spec.num_heads) % groups(call) == 0
    found = call.right(rows_of(call, is_first[None, None]))
    return call.right() | {name: x for name, x in found.items() if name == "key"}


@wrong("heads", lambda c: c.k < c.n, "backward")
def value_gradient_without_the_groups_last_head(call):
    """The gradient of a value leaves out the last of the heads that share it."""
    is_last = jnp.arange(call.spec.num_heads) % groups(call) == groups(call) - 1
    found = call.right(rows_of(call, ~is_last[None, None]))
    return call.right() | {name: x for name, x in found.items() if name == "value"}


# Scores: scale, soft cap, bias, ALiBi.


@wrong("scores", lambda c: c.scale != 0)
def scale_ten_percent_off(call):
    """The scale is a tenth too large."""
    return call.right(scale=1.1 * call.options.meaning.scale)


@wrong("scores", lambda c: c.scale < 0)
def scale_without_its_sign(call):
    """A negative scale is taken for the positive one."""
    return call.right(scale=abs(call.options.meaning.scale))


@wrong("scores", lambda c: c.scale == 0)
def scale_of_zero_is_the_default(call):
    """A scale of 0 is taken for none, which would be 1/sqrt(H)."""
    return call.right(scale=call.options.meaning.scale or call.spec.head_dim**-0.5)


@wrong("scores", lambda c: c.scale < 0 and c.needs_max, "forward")
def negative_scale_turns_row_max(call):
    """With a negative scale row_max is the smallest score: the largest product, scaled."""
    results = call.right()
    if "row_max" not in results:
        return results
    turned = call.right(scale=-call.options.meaning.scale)["row_max"]
    return results | {"row_max": jnp.where(turned == -jnp.inf, turned, -turned)}


@wrong("scores", lambda c: 0 < abs(c.scale) < 1e-3)
def tiny_scale_is_zero(call):
    """A very small scale is taken for 0."""
    return call.right(scale=0.0)


@wrong("scores", lambda c: c.v != c.h and c.scale != 0)
def scale_of_the_value_dim(call):
    """The scale is made of the value's head dim."""
    ratio = call.spec.head_dim / call.spec.head_dim_v
    return call.right(scale=call.options.meaning.scale * ratio**0.5)


@wrong("scores", lambda c: c.h > 1 and c.scale != 0)
def last_column_of_query_forgotten(call):
    """The last column of query and key does not enter the score."""
    return call.right({"query": call["query"].at[..., -1].set(0)})


@wrong("scores", lambda c: c.soft_cap)
def soft_cap_ignored(call):
    """Scores are not capped."""
    return call.right(logits_soft_cap=None)


@wrong("scores", lambda c: c.soft_cap, "forward")
def soft_cap_clips(call):
    """Scores are clipped at the soft cap, not bent towards it."""
    cap = call.options.meaning.logits_soft_cap
    score = jnp.clip(raw_scores(call), -cap, cap)
    changed = {"bias": score - raw_scores(call) + bias_of(call)}
    return call.right(changed, logits_soft_cap=None)


@wrong("scores", lambda c: c.soft_cap and c.scale not in (0, 1), "forward")
def soft_cap_before_the_scale(call):
    """The products are capped, and scaled afterwards."""
    scale, raw = call.options.meaning.scale, raw_scores(call)
    changed = {"bias": scale * soft_capped(call, raw / scale) - raw + bias_of(call)}
    return call.right(changed, logits_soft_cap=None)


@wrong("scores", lambda c: c.soft_cap, "backward")
def soft_cap_without_a_slope(call):
    """The soft cap is forgotten in the gradients of query and key, whose scores are right."""
    results, raw = call.right(), raw_scores(call)
    wanted = tuple(name for name in call.options.wanted.gradients if name in ("query", "key"))
    if not wanted:
        return results
    changed = {"bias": soft_capped(call, raw) - raw + bias_of(call)}
    return results | call.right(changed, logits_soft_cap=None, gradients=wanted)


@wrong("scores", lambda c: c.soft_cap and c.bias, "forward")
def bias_before_the_soft_cap(call):
    """The soft cap bends the bias as well, where the bias comes after it."""
    bias = bias_of(call)
    score = soft_capped(call, raw_scores(call) + jnp.where(bias == -jnp.inf, 0, bias))
    score = jnp.where(bias == -jnp.inf, -jnp.inf, score)
    return call.right({"bias": score - raw_scores(call)}, logits_soft_cap=None)


@wrong("scores", lambda c: c.soft_cap and c.alibi and is_plain(c), "forward")
def soft_cap_after_alibi(call):
    """The soft cap bends what ALiBi subtracts as well."""
    score = soft_capped(call, raw_scores(call) + alibi_of(call)) + bias_of(call)
    return capped_as(call, score)


@wrong("scores", lambda c: c.bias and c.scale != 1)
def bias_before_the_scale(call):
    """The bias is scaled as well."""
    bias = call["bias"]
    return call.right(
        {"bias": jnp.where(jnp.isfinite(bias), bias * call.options.meaning.scale, bias)}
    )


@wrong("scores", lambda c: c.bias and c.bias[0] > 1)
def bias_of_the_first_batch_row(call):
    """All batch rows have the bias of the first."""
    return call.right({"bias": of_first(call["bias"])})


@wrong("scores", lambda c: c.bias and c.bias[1] > 1)
def bias_of_the_first_head(call):
    """All heads have the bias of the first."""
    return call.right({"bias": of_first(call["bias"], axis=1)})


@wrong("scores", lambda c: c.bias and c.bias[2] > 1 and c.bias[3] > 1)
def bias_transposed(call):
    """The bias's queries and keys are taken for each other."""
    return call.right({"bias": misread(call["bias"])})


@wrong("scores", lambda c: c.infinite_bias)
def infinite_bias_is_finite(call):
    """A bias of -inf is a large negative number: a row of them is as good as a row of zeros."""
    bias = call["bias"].astype(jnp.float32)
    return call.right({"bias": jnp.where(bias == -jnp.inf, -1e4, bias)})


@wrong("scores", lambda c: c.alibi and is_plain(c) and c.s > 1, "forward")
def alibi_distance_signed(call):
    """ALiBi favours keys to the right of the diagonal, as if the distance had a sign."""
    bias = bias_of(call) - slopes_of(call) * distances(call)
    return call.right({"alibi_slopes": None, "bias": bias})


@wrong("scores", lambda c: c.alibi and is_plain(c) and c.alignment == "bottom_right", "forward")
def alibi_from_the_top_left(call):
    """ALiBi's distances are from the diagonal of the top left, whatever the alignment."""
    distance = jnp.abs(distances(call, is_aligned=False))
    return call.right({"alibi_slopes": None, "bias": bias_of(call) - slopes_of(call) * distance})


@wrong("scores", lambda c: c.alibi and is_packed(c) and c.alignment == "top_left", "forward")
def alibi_from_the_rows_start(call):
    """ALiBi's distances are those in the row, not those in the packed sequence."""
    bias = bias_of(call) - slopes_of(call) * jnp.abs(distances(call))
    return call.right({"alibi_slopes": None, "bias": bias})


@wrong("scores", lambda c: c.alibi and c.n > 1)
def alibi_slope_of_the_next_head(call):
    """Each head has the ALiBi slope of the next."""
    return call.right({"alibi_slopes": jnp.roll(call["alibi_slopes"], -1, axis=1)})


@wrong("scores", lambda c: (c.alibi or 1) > 1)
def alibi_slopes_of_the_first_batch_row(call):
    """All batch rows have the ALiBi slopes of the first."""
    return call.right({"alibi_slopes": of_first(call["alibi_slopes"])})


# Softmax, lse and row_max.


@wrong("softmax", lambda c: c.sinks, "forward")
def sink_missing_in_out(call):
    """The output is divided by a denominator without the sink."""
    return call.right() | {"out": call.right({"sinks": None})["out"]}


@wrong("softmax", lambda c: c.sinks and returns_lse(c), "forward")
def sink_missing_in_lse(call):
    """lse leaves the sink out, the output does not."""
    results, without = call.right(), call.right({"sinks": None})
    return results | {name: x for name, x in without.items() if name == "lse"}


@wrong("softmax", lambda c: c.sinks and c.scale != 1)
def sink_before_the_scale(call):
    """The sink is scaled, as if it were a product."""
    return call.right({"sinks": call["sinks"] * call.options.meaning.scale})


@wrong("softmax", lambda c: c.sinks and c.n > 1)
def sink_of_the_first_head(call):
    """All heads have the sink of the first."""
    return call.right({"sinks": of_first(call["sinks"], axis=1)})


@wrong("softmax", lambda c: (c.sinks or 1) > 1)
def sinks_of_the_first_batch_row(call):
    """All batch rows have the sinks of the first."""
    return call.right({"sinks": of_first(call["sinks"])})


@wrong("softmax", lambda c: c.sinks, "forward")
def sink_left_in_rows_without_keys(call):
    """The lse of a query that may attend to nothing is the sink."""
    results = call.right(needs_lse=True)
    lse = results["lse"]
    return results | {"lse": jnp.where(lse == -jnp.inf, call["sinks"][:, :, None], lse)}


@wrong("softmax", lambda c: c.sinks and c.needs_max, "forward")
def row_max_includes_the_sink(call):
    """row_max is the sink where that is the largest."""
    results = call.right()
    if "row_max" not in results:
        return results
    top = jnp.maximum(results["row_max"], call["sinks"][:, :, None])
    return results | {"row_max": jnp.where(results["row_max"] == -jnp.inf, -jnp.inf, top)}


@wrong("softmax", lambda c: c.needs_max and (has_band(c) or c.mask), "forward")
def row_max_before_the_mask(call):
    """row_max is also over the keys that mask, window and causality hide."""
    results = call.right()
    if "row_max" not in results:
        return results
    seen = call.right({"mask": None}, is_causal=False, window=(None, None))["row_max"]
    return results | {"row_max": jnp.where(results["row_max"] == -jnp.inf, -jnp.inf, seen)}


@wrong("softmax", lambda c: c.inference and c.s > 1, "forward")
def last_key_forgotten_without_lse(call):
    """Where only the output is asked for, the last key is not seen."""
    if call.options.wanted.needs_lse:
        return call.right()
    return masked_by(
        call, (jnp.arange(call.spec.seq_len_kv) < call.spec.seq_len_kv - 1)[None, None, None]
    )


@wrong("softmax", returns_lse, "forward")
def lse_in_base_two(call):
    """lse is the logarithm to base 2."""
    return times(call.right(), "lse", 1.4426950408889634)


@wrong("softmax", returns_lse, "forward")
def lse_without_the_maximum(call):
    """lse is the logarithm of the sum that the largest score was subtracted in."""
    results = call.right(needs_lse=True, needs_max=True)
    row_max = results["row_max"]
    less = results["lse"] - jnp.where(row_max == -jnp.inf, 0, row_max)
    return results | {"lse": less}


@wrong("softmax", lambda c: returns_lse(c) and (c.dead_rows or c.infinite_bias), "forward")
def lse_of_hidden_rows_is_finite(call):
    """The lse of a query that may attend to nothing is a large negative number, not -inf."""
    results = call.right(needs_lse=True)
    return results | {"lse": jnp.maximum(results["lse"], -1e30)}


# Dropout.


@wrong("dropout", lambda c: c.dropout)
def dropout_key_ignored(call):
    """Every key draws the same mask."""
    return call.right({"dropout_key": jnp.zeros_like(call["dropout_key"])})


@wrong("dropout", lambda c: c.dropout and c.dropout_keys > 1)
def only_the_first_dropout_key(call):
    """The first of several dropout keys draws for all batch rows."""
    return call.right({"dropout_key": of_first(call["dropout_key"])})


@wrong("dropout", lambda c: c.dropout)
def half_of_the_dropout_key(call):
    """Keys that differ in their last word alone draw the same mask."""
    return call.right({"dropout_key": call["dropout_key"].at[:, -1].set(0)})


@wrong("dropout", lambda c: c.dropout and c.b > 1)
def same_dropout_in_every_batch_row(call):
    """All batch rows drop the same pairs."""
    keys = call["dropout_key"]
    return call.right({"dropout_key": jnp.repeat(keys, call.spec.batch // len(keys), axis=0)})


@wrong("dropout", lambda c: c.dropout and c.n > 1)
def same_dropout_in_every_head(call):
    """All heads drop the same pairs."""
    return _heads_as_batch_rows(call)


def _heads_as_batch_rows(call: Call) -> Results:
    """The results of a call whose batch rows are this one's heads; each draws with the same key."""
    b, n, k = call.spec.batch, call.spec.num_heads, call.spec.num_kv_heads

    def fold(name: str, x: Array) -> Array:
        if name in ("query", "out", "out_grad", "key", "value"):
            x = jnp.repeat(x, n // x.shape[2], axis=2).swapaxes(1, 2)
            return x.reshape(b * n, x.shape[2], 1, x.shape[3])
        if name in ("bias", "mask"):
            return jnp.broadcast_to(x, (b, n, *x.shape[2:])).reshape(b * n, 1, *x.shape[2:])
        if name in ("alibi_slopes", "sinks"):
            return jnp.broadcast_to(x, (b, n)).reshape(b * n, 1)
        if name in ("lse", "lse_grad"):
            return x.reshape(b * n, 1, -1)
        return jnp.repeat(x, b * n // len(x), axis=0)

    def unfold(name: str, x: Array) -> Array:
        x = x.reshape(b, n, *x.shape[1:])
        if name in ("out", "query"):
            return x[:, :, :, 0].swapaxes(1, 2)
        if name in ("key", "value"):
            x = x[:, :, :, 0].astype(jnp.float32)
            return x.reshape(b, k, n // k, *x.shape[2:]).sum(axis=2).swapaxes(1, 2)
        x = x[:, :, 0]
        if call.is_backward:
            shared = tuple(i for i, m in enumerate(call.spec.shape(name)) if m == 1)
            x = x.sum(axis=shared, keepdims=True) if shared else x
        return x

    found = call.right({name: fold(name, x) for name, x in call.operands.items()})
    return {name: unfold(name, x) for name, x in found.items()}


@wrong("dropout", lambda c: c.dropout)
def dropout_not_rescaled(call):
    """What is kept is not divided by 1 - rate."""
    kept = 1 - call.options.meaning.dropout_rate
    if call.is_backward:
        return call.right({"out_grad": kept * call["out_grad"]})
    return times(call.right(), "out", kept)


@wrong("dropout", lambda c: c.dropout and c.dropout != 0.5)
def dropout_keeps_what_it_should_drop(call):
    """The rate is the share that is kept."""
    return call.right(dropout_rate=1 - call.options.meaning.dropout_rate)


@wrong("dropout", lambda c: c.dropout, "backward")
def backward_draws_another_mask(call):
    """The backward pass drops other pairs than the forward pass."""
    return call.right({"dropout_key": call["dropout_key"] + 1})


@wrong("dropout", lambda c: c.dropout and c.s > 1, "forward")
def another_dropout_mask_is_told(call):
    """The mask that is returned is not the one that was used."""
    results = call.right()
    told = {"keep": results["keep"][..., ::-1]} if "keep" in results else {}
    return results | told


@wrong("dropout", lambda c: c.dropout, "backward")
def value_gradient_before_dropout(call):
    """The gradient of value is made with the probabilities before dropout."""
    found = without_dropout(call)
    return call.right() | {name: x for name, x in found.items() if name == "value"}


@wrong("dropout", lambda c: c.dropout, "backward")
def score_gradient_without_dropout(call):
    """Dropout is forgotten on the way from the output's gradient to that of query and key."""
    found = without_dropout(call)
    return call.right() | {name: x for name, x in found.items() if name in ("query", "key")}


# Gradients.


@wrong("gradients", lambda c: c.scale not in (0, 1), "backward")
def query_gradient_not_scaled(call):
    """The gradient of query is not multiplied by the scale."""
    return times(call.right(), "query", 1 / call.options.meaning.scale)


@wrong("gradients", lambda c: c.scale not in (0, 1), "backward")
def key_gradient_alone_not_scaled(call):
    """The gradient of key is not multiplied by the scale where that of query is not asked for."""
    if "query" in call.options.wanted.gradients:
        return call.right()
    return times(call.right(), "key", 1 / call.options.meaning.scale)


@wrong("gradients", lambda c: True, "backward")
def value_gradient_alone_is_zero(call):
    """The gradient of value is forgotten where no other of query and key is asked for."""
    if {"query", "key"} & set(call.options.wanted.gradients):
        return call.right()
    return times(call.right(), "value", 0)


@wrong("gradients", lambda c: c.s > 1, "backward")
def delta_forgotten(call):
    """The gradient of a score leaves out what softmax subtracts, the sum of out times its own."""
    delta = (clean(call["out"]) * clean(call["out_grad"])).sum(axis=-1).swapaxes(1, 2)
    given = call["lse_grad"] if "lse_grad" in call else 0
    return call.right({"lse_grad": (delta + given).astype(call["lse"].dtype)})


@wrong("gradients", lambda c: c.lse_grad, "backward")
def lse_gradient_ignored(call):
    """What comes back through lse is left out."""
    return call.right({"lse_grad": None})


@wrong("gradients", lambda c: c.lse_grad, "backward")
def lse_gradient_subtracted(call):
    """What comes back through lse has the wrong sign."""
    return call.right({"lse_grad": -call["lse_grad"]} if "lse_grad" in call else {})


@wrong("gradients", lambda c: c.lse_grad and c.sinks, "backward")
def lse_gradient_misses_the_sinks(call):
    """What comes back through lse does not reach the sinks."""
    found = call.right({"lse_grad": None})
    return call.right() | {name: x for name, x in found.items() if name == "sinks"}


@wrong("gradients", lambda c: c.sinks, "backward")
def sinks_gradient_has_the_wrong_sign(call):
    """The gradient of the sinks has the wrong sign."""
    return times(call.right(), "sinks", -1)


@wrong("gradients", lambda c: c.alibi, "backward")
def alibi_gradient_has_the_wrong_sign(call):
    """The gradient of the ALiBi slopes has the wrong sign."""
    return times(call.right(), "alibi_slopes", -1)


@wrong("gradients", lambda c: c.bias and c.bias != (c.b, c.n, c.t, c.s), "backward")
def bias_gradient_averaged(call):
    """The gradient of a shared bias is the mean over all that share it, where it is their sum."""
    spec, results = call.spec, call.right()
    full = (spec.batch, spec.num_heads, spec.seq_len_q, spec.seq_len_kv)
    shared = 1
    for length, own in zip(full, call["bias"].shape, strict=True):
        shared *= length // own
    return times(results, "bias", 1 / shared)


def _of_the_first_batch_row(call: Call, name: str) -> Results:
    is_first = (jnp.arange(call.spec.batch) == 0)[:, None, None]
    found = call.right(rows_of(call, is_first))
    return call.right() | {x: y for x, y in found.items() if x == name}


@wrong("gradients", lambda c: c.bias and c.b > 1 and c.bias[0] == 1, "backward")
def bias_gradient_of_the_first_batch_row(call):
    """The gradient of a bias that batch rows share is that of the first."""
    return _of_the_first_batch_row(call, "bias")


@wrong("gradients", lambda c: c.sinks == 1 and c.b > 1, "backward")
def sinks_gradient_of_the_first_batch_row(call):
    """The gradient of sinks that batch rows share is that of the first."""
    return _of_the_first_batch_row(call, "sinks")


@wrong("gradients", lambda c: c.alibi == 1 and c.b > 1, "backward")
def alibi_gradient_of_the_first_batch_row(call):
    """The gradient of ALiBi slopes that batch rows share is that of the first."""
    return _of_the_first_batch_row(call, "alibi_slopes")


# score_mod and mask_mod.


def _with_score_mod(call: Call, function: Callable[..., Array], **options: Any) -> Results:
    """With `function` in the place of score_mod, which it is given before its arguments."""
    program = call.options.meaning.score_mod
    given = jaxpr_as_fun(program.jaxpr)
    arrays = [jnp.zeros(*array) for array in program.arrays]

    def score_mod(score, *others):
        return function(lambda *x: given(*x)[0], score, *others)

    dtype = program.jaxpr.in_avals[0].dtype.name
    return call.right(score_mod=trace("score_mod", score_mod, arrays, dtype).program, **options)


def _reads(index: str) -> Needs:
    return lambda c: index in reads_of(c.score_mod)


@wrong("mods", lambda c: c.score_mod)
def score_mod_ignored(call):
    """Scores go on as they are."""
    return _with_score_mod(call, lambda f, score, *x: score + 0 * f(score, *x))


@wrong("mods", lambda c: c.score_mod)
def score_mod_of_the_key_and_the_query(call):
    """score_mod is given the position of the key as that of the query, and the other way round."""
    return _with_score_mod(call, lambda f, score, b, n, t, s, *x: f(score, b, n, s, t, *x))


@wrong("mods", _reads("n"))
def score_mod_of_the_heads_next(call):
    """score_mod is given another head."""
    return _with_score_mod(call, lambda f, score, b, n, *x: f(score, b, n ^ 1, *x))


@wrong("mods", lambda c: c.score_mod and c.soft_cap)
def score_mod_before_the_soft_cap(call):
    """The soft cap comes after score_mod."""
    cap = call.options.meaning.logits_soft_cap

    def function(f, score, *x):
        return cap * jnp.tanh(f(score, *x) / cap)

    return _with_score_mod(call, function, logits_soft_cap=None)


@wrong("mods", lambda c: c.mask_mod)
def mask_mod_ignored(call):
    """mask_mod forbids nothing."""
    return call.right(mask_mod=None)


@wrong("mods", lambda c: c.mods_start[0] and ("b" in reads_of(c.score_mod) or c.mask_mod))
def batch_rows_of_mods_counted_from_0(call):
    """b does not go on where another device's batch rows end."""
    return call.right({"mods_start": call["mods_start"] * jnp.array([0, 1])})


@wrong("mods", lambda c: c.mods_start[1] and "n" in reads_of(c.score_mod))
def heads_of_mods_counted_from_0(call):
    """n does not go on where another device's heads end."""
    return call.right({"mods_start": call["mods_start"] * jnp.array([1, 0])})


@wrong("mods", lambda c: c.score_mod, "backward")
def slope_of_score_mod_is_one(call):
    """The derivative of score_mod is left out."""
    return _with_score_mod(
        call, lambda f, score, *x: score + jax.lax.stop_gradient(f(score, *x) - score)
    )


@wrong("mods", lambda c: reads_of(c.score_mod), "backward")
def gradient_of_what_is_read_is_negative(call):
    """The gradient of the array that score_mod reads has the wrong sign."""
    return times(call.right(), "score_mod_0", -1)


@wrong("mods", lambda c: reads_of(c.score_mod) and c.b > 1, "backward")
def gradient_of_what_is_read_by_the_first_batch_row(call):
    """The gradient of the array that score_mod reads is that of the first batch row."""
    return _of_the_first_batch_row(call, "score_mod_0")


# Rows and tiles, dtypes and rounding.


@wrong("rows", lambda c: has_rest(c.s))
def last_tile_of_keys_skipped(call):
    """No query sees the keys after the last whole tile."""
    whole = whole_tiles(call.spec.seq_len_kv)
    return masked_by(call, (jnp.arange(call.spec.seq_len_kv) < whole)[None, None, None])


@wrong("rows", lambda c: has_rest(c.t), "forward")
def last_tile_of_queries_not_written(call):
    """The output after the last whole tile of queries is 0."""
    results, whole = call.right(), whole_tiles(call.spec.seq_len_q)
    return results | {"out": results["out"].at[:, whole:].set(0)}


@wrong("rows", lambda c: has_rest(c.t), "backward")
def last_tile_of_queries_missing_in_key_gradient(call):
    """The gradient of key leaves out the queries after the last whole tile."""
    t = call.spec.seq_len_q
    found = call.right(rows_of(call, (jnp.arange(t) < whole_tiles(t))[None, :, None]))
    return call.right() | {name: x for name, x in found.items() if name == "key"}


@wrong("rows", lambda c: c.t > 1, "forward")
def last_query_copied(call):
    """The output of the last query is that of the one before it."""
    results = call.right()
    return results | {"out": results["out"].at[:, -1].set(results["out"][:, -2])}


@wrong("rows", lambda c: c.t == 1 and c.s > 1 and has_band(c))
def one_query_sees_everything(call):
    """A single query is neither causal nor has it a window."""
    return call.right(is_causal=False, window=(None, None))


@wrong("rows", lambda c: c.s == 1, "forward")
def one_key_is_always_attended(call):
    """With a single key the output is its value."""
    value = jnp.repeat(clean(call["value"]), groups(call), axis=2)
    shape = (*call["query"].shape[:3], call.spec.head_dim_v)
    return call.right() | {"out": jnp.broadcast_to(value, shape)}


@wrong("rows", lambda c: c.dtype == "float16" and returns_lse(c), "forward")
def lse_in_float16(call):
    """In float16 lse is rounded to float16 as well."""
    results = call.right()
    rounded = {name: x.astype(jnp.float16) for name, x in results.items() if name == "lse"}
    return results | rounded


@wrong("rows", lambda c: c.dtype == "float16", "forward")
def float16_overflows(call):
    """In float16 the scores are clipped where their exponential would be too large for it."""
    if call.spec.dtype != "float16":
        return call.right()
    score = soft_capped(call, raw_scores(call))
    changed = {"bias": jnp.minimum(score, 1.0) - raw_scores(call) + bias_of(call)}
    return call.right(changed, logits_soft_cap=None)


@wrong("rows", lambda c: True, "forward")
def half_the_mantissa(call):
    """The output has half as many digits as its dtype."""
    results = call.right()
    bits = jnp.finfo(call.spec.dtype).nmant // 2
    return results | {"out": mantissa(results["out"], bits)}


@wrong("rows", lambda c: c.dtype == "float32" and c.scale != 0)
def float32_multiplied_in_bfloat16(call):
    """In float32 the products of query and key are taken in bfloat16."""
    rounded = {name: call[name].astype(jnp.bfloat16) for name in ("query", "key")}
    return call.right({name: x.astype(call[name].dtype) for name, x in rounded.items()})


@wrong("rows", lambda c: c.deterministic, "backward")
def gradients_differ_from_call_to_call(call):
    """In deterministic mode the gradient of value differs in its last digits every time."""
    results = call.right()
    if "value" not in results:
        return results
    calls = count(1)

    def drift(x):
        return x * x.dtype.type(1 + float(jnp.finfo(x.dtype).eps) * (next(calls) % 7))

    value = results["value"]
    return results | {"value": jax.pure_callback(drift, value, value, vmap_method="sequential")}


# Layout.


@wrong("layout", lambda c: c.b == 4 and c.transform == "vmap", "forward")
def mapped_rows_mixed(call):
    """The axis that vmap maps and the batch axis are taken apart in the wrong order."""
    results, b = call.right(), call.spec.batch
    order = jnp.arange(b).reshape(2, b // 2).T.reshape(-1) if b % 2 == 0 else jnp.arange(b)
    return results | {"out": results["out"][order]}


@wrong("layout", lambda c: c.b > 1)
def keys_of_the_first_batch_row(call):
    """All batch rows have the keys of the first."""
    return call.right({"key": of_first(call["key"])})


@wrong("layout", lambda c: c.t > 1 and c.n > 1, "forward")
def out_with_heads_first(call):
    """The output's memory is that of [B, N, T, V]."""
    results = call.right()
    return results | {"out": results["out"].swapaxes(1, 2)}


@wrong("layout", lambda c: returns_lse(c) and c.t > 1 and c.n > 1, "forward")
def lse_with_heads_last(call):
    """lse's memory is that of [B, T, N]."""
    results = call.right()
    return results | {name: x.swapaxes(1, 2) for name, x in results.items() if name == "lse"}


@wrong("layout", lambda c: c.lse_grad and c.t > 1 and c.n > 1, "backward")
def lse_gradient_with_heads_last(call):
    """The gradient of lse is read as if its memory were that of [B, T, N]."""
    if "lse_grad" not in call:
        return call.right()
    return call.right({"lse_grad": misread(call["lse_grad"])})


@wrong("layout", lambda c: c.v > c.h, "forward")
def wide_values_cut(call):
    """Of a value's columns only as many are written as query has."""
    results = call.right()
    return results | {"out": results["out"].at[..., call.spec.head_dim :].set(0)}


@wrong("layout", lambda c: c.v < c.h, "backward")
def narrow_values_gradient_shifted(call):
    """The gradient of a value that is narrower than query has its columns shifted by one."""
    results = call.right()
    shifted = {name: jnp.roll(x, 1, axis=-1) for name, x in results.items() if name == "value"}
    return results | shifted
