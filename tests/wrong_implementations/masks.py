"""Wrong masks and windows."""

from __future__ import annotations

import jax.numpy as jnp

from tests.wrong_implementations.features import has_band, has_lengths, is_packed, is_plain
from tests.wrong_implementations.implementation import wrong
from tests.wrong_implementations.parts import (
    banded_by,
    distances,
    first_everywhere,
    masked_by,
    misread,
)


@wrong(lambda c: c.window[0] is not None)
def window_reaches_one_further_left(call):
    """The window reaches one key further to the left."""
    left, right = call.options.meaning.window
    return call.right(window=(left + 1, right))


@wrong(lambda c: (c.window[0] or 0) > 0)
def window_reaches_one_less_left(call):
    """The window reaches one key less far to the left."""
    left, right = call.options.meaning.window
    return call.right(window=(left - 1, right))


@wrong(lambda c: c.window[1] is not None and not c.is_causal)
def window_reaches_one_further_right(call):
    """The window reaches one key further to the right."""
    left, right = call.options.meaning.window
    return call.right(window=(left, right + 1))


@wrong(lambda c: not c.is_causal and c.window[0] != c.window[1])
def window_sides_swapped(call):
    """The window's left and right bounds are swapped."""
    return call.right(window=call.options.meaning.window[::-1])


@wrong(lambda c: c.is_causal and c.window[0] is not None)
def window_forgotten_where_causal(call):
    """A causal call ignores its window's left bound."""
    return call.right(window=(None, None))


@wrong(lambda c: c.is_causal and c.s > 1)
def causal_sees_the_next_key(call):
    """The causal diagonal is one key too far to the right."""
    return call.right(is_causal=False, window=(call.options.meaning.window[0], 1))


@wrong(lambda c: c.is_causal and is_plain(c))
def causal_hides_the_key_on_the_diagonal(call):
    """A causal query does not see the key on its diagonal."""
    return masked_by(call, distances(call) > 0)


@wrong(lambda c: c.alignment == "bottom_right" and has_band(c))
def alignment_ignored(call):
    """The diagonal starts at the top left where it should end at the bottom right."""
    return call.right(causal_alignment="top_left")


@wrong(
    lambda c: c.alignment == "bottom_right" and has_band(c) and has_lengths(c) and is_plain(c),
)
def bottom_right_of_the_arrays(call):
    """The diagonal ends at the corner of the arrays, not where the sequences end."""
    offset = call.spec.seq_len_kv - call.spec.seq_len_q
    return banded_by(call, distances(call, is_aligned=False) + offset)


@wrong(lambda c: c.alignment == "top_left" and has_band(c) and is_packed(c))
def band_counted_from_the_rows_start(call):
    """The diagonal of a packed sequence starts at the start of the row, not of the sequence."""
    return banded_by(call, distances(call))


@wrong(lambda c: c.mask and c.mask[2] > 1 and c.mask[3] > 1)
def mask_transposed(call):
    """The mask's query axis and key axis are swapped."""
    return call.right({"mask": misread(call["mask"])})


@wrong(lambda c: c.mask)
def mask_inverted_in_the_last_head(call):
    """The last head's mask is inverted."""
    b, _, t, s = call["mask"].shape
    mask = jnp.broadcast_to(call["mask"], (b, call.spec.num_heads, t, s))
    return call.right({"mask": mask.at[:, -1].set(~mask[:, -1])})


@wrong(lambda c: c.mask and c.mask[3] > 1)
def mask_ignored_for_the_last_key(call):
    """Every query sees the last key, even where the mask hides it."""
    return call.right({"mask": call["mask"].at[..., -1].set(True)})


@wrong(lambda c: c.mask and c.mask[2] > 1)
def mask_of_the_row_before_for_the_last_query(call):
    """The last query has the mask of the query before it."""
    mask = call["mask"]
    return call.right({"mask": mask.at[:, :, -1].set(mask[:, :, -2])})


@wrong(lambda c: c.mask and c.mask[0] > 1)
def mask_of_the_first_batch_row(call):
    """All batch rows have the mask of the first."""
    return call.right({"mask": first_everywhere(call["mask"])})


@wrong(lambda c: c.mask and c.mask[1] > 1)
def mask_of_the_first_head(call):
    """All heads have the mask of the first."""
    return call.right({"mask": first_everywhere(call["mask"], axis=1)})


@wrong(lambda c: c.mask and c.is_causal)
def causal_forgotten_beside_a_mask(call):
    """A causal call with a mask is not causal."""
    return call.right(is_causal=False)
