"""The arrays of a call: its operands and its results, with their shapes and dtypes.

Letters used for shapes here and everywhere: B batch, T query length, S key length, N heads,
K kv heads, G = N // K, H head dim of query and key, V head dim of value.

A call's operands are named in `AttentionOptions.operands` (options.py). In a spec every one starts
with one batch axis, which is folded from the leading dims (leading.py):

====================== ========================== ===================
operand                shape                      dtype
====================== ========================== ===================
query                  [B, T, N, H]               the call's dtype
key, value             [B, S, K, H], [B, S, K, V] the call's dtype
key_pages, value_pages [C, P, page, K, H or V]    the call's dtype
page_table             [B, M], B % C == 0         int32
bias                   [1|B, 1|N, 1|T, 1|S]       floating
mask                   [1|B, 1|N, 1|T, 1|S]       bool, True = attend
query_seq_lengths      [B]                        int32
key_value_seq_lengths  [B]                        int32
query_segment_ids      [B, T]                     int32
key_value_segment_ids  [B, S]                     int32
cu_seqlens_q           [B, M + 1]                 int32
cu_seqlens_kv          [B, M + 1]                 int32
window                 [1|B, 2]                   int32, (left, right)
causal_offset          [1|B]                      int32
alibi_slopes           [1|B, N]                   floating
sinks                  [1|B, N]                   floating
dropout_key            [D, words], B % D == 0     uint32 key data
dropout_start          [D, 2]                     int32
score_mod_0, …         [1|C, ...]                 any; what score_mod reads
mask_mod_0, …          [1|C, ...]                 any; what mask_mod reads
mods_start             [C, 2], B % C == 0         int32
out, out_grad          [B, T, N, V]               the call's dtype
lse, lse_grad          [B, N, T]                  `lse_dtype`
keep                   [B, N, T, S]               bool
====================== ========================== ===================

A paged call has key_pages, value_pages and page_table instead of key and value, and S is
M · page: key s of batch row b is key s % page of page page_table[b, s // page], of the pages of
pool b // (B / C); its value is in page page_table[b, s // page] + value_page. It has
key_value_seq_lengths, and no gradients; entries of the table past a length mean nothing.

Only the backward pass has the last three rows: `lse_grad` only if lse was returned, and `keep` only
instead of dropout_key and dropout_start, if XLA computes with another implementation's mask.
Row d of dropout_key draws the mask of the B / D consecutive batch rows from d·B/D on. If the call
is one device's part of a larger one, dropout_start has for each key the first of the key's batch
rows, and the first head, of this part. Likewise entry c of the arrays that mods read serves the
B / C consecutive batch rows from c·B/C on. Mods get b counted from mods_start[c, 0] on in these
rows, and n from mods_start[c, 1] on.

The forward pass returns these results, in this order, as far as the options name them:

======= ============ =========== =================================================================
result  shape        dtype
======= ============ =========== =================================================================
out     [B, T, N, V] the call's
lse     [B, N, T]    `lse_dtype` log of the softmax denominator, sink included
row_max [B, N, T]    `lse_dtype` largest score that the row may attend to, without the sink: after
                                 scale, soft cap, bias, ALiBi and mask; -inf if there is none
keep    [B, N, T, S] bool        True where dropout keeps a pair (everywhere without dropout);
                                 unspecified where the pair may not attend
======= ============ =========== =================================================================

out and lse are differentiable, row_max and keep are not. The backward pass returns the wanted
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
from numpy.typing import DTypeLike

Operands = Mapping[str, jax.Array]
"""The arrays of a call, by the names of its spec's operands."""


class ArrayType(Protocol):
    """An array, or its shape and dtype alone."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> DTypeLike: ...


@dataclass(frozen=True)
class Operand:
    """The shape and the name of the dtype of one array of the call."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        """The array as the caller gave it: pages of one pool have no axis of pools."""
        is_one_pool = self.name in ("key_pages", "value_pages") and self.shape[0] == 1
        shape = self.shape[1:] if is_one_pool else self.shape
        return f"{self.name} {self.dtype}{list(shape)}"
