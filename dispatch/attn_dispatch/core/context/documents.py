"""Packed documents of which each is in zigzag order over the devices.

Of a document's 2 · P chunks, device r holds chunks r and 2P - 1 - r, next to each other. So all
devices have the same ids in the same order, and equally much to do in every step of a ring,
whatever the documents' lengths. Ids, not slices, say which halves attend to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.core.context.device_call import KEYS, Arrays, DeviceCall

_ROWS, _KEYS = "query_segment_ids", "key_value_segment_ids"


@dataclass(frozen=True)
class Documents:
    """The documents on a device."""

    ids: jax.Array
    """The ids of rows and keys, [..., T]; 0 is padding, and rows below 0 become NaN."""
    is_second: jax.Array
    """Whether a row is in the second of a document's two chunks."""

    @staticmethod
    def of(device: DeviceCall) -> Documents | None:
        """The documents of a call in their order; None if order is another, or of no account."""
        if not is_by_document(device):
            return None
        ids = device.operands[_ROWS]
        if not device.is_backward:  # rows in another order would be masked wrongly
            ids = jnp.where(ids == device.shift({_ROWS: ids})[_ROWS], ids, -1)
        return Documents.in_halves(ids)

    @staticmethod
    def in_halves(ids: jax.Array) -> Documents:
        """The documents that are the runs of equal ids. One of odd length gets ids below 0."""
        axis, length = ids.ndim - 1, ids.shape[-1]
        places = jnp.arange(length, dtype=jnp.int32)
        is_new = ids[..., 1:] != ids[..., :-1]
        first, last = ([*[(0, 0)] * axis, x] for x in ((1, 0), (0, 1)))
        begins = jnp.where(jnp.pad(is_new, first), places, 0)
        ends = jnp.where(jnp.pad(is_new, last), places + 1, length)
        begin = lax.cummax(begins, axis)
        end = lax.cummin(ends, axis, reverse=True)
        is_odd = ((end - begin) % 2 == 1) & (ids != 0)
        return Documents(jnp.where(is_odd, -1, ids), 2 * (places - begin) >= end - begin)

    def ids_of_step(self, *, is_earlier: jax.Array) -> Arrays:
        """The ids of rows, and of another device's keys, in a step without causality.

        All rows attend to the first halves of an earlier device's keys. Second halves of rows alone
        attend to the keys of a later device.

        Args:
          is_earlier: whether the other device comes before this one.
        """
        return {
            _ROWS: jnp.where(is_earlier | self.is_second, self.ids, 0),
            _KEYS: jnp.where(is_earlier & self.is_second, 0, self.ids),
        }


def is_by_document(device: DeviceCall) -> bool:
    """Whether a call is in the order of documents, and is causal, so that order counts."""
    return device.context.order == "documents" and device.meaning.is_causal


def sent(device: DeviceCall) -> Arrays:
    """The operands that go round: keys and values, and ids if devices may have different ones."""
    return device.only(KEYS.keys() - ({_KEYS} if is_by_document(device) else set()))
