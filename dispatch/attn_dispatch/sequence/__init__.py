"""The order of a sequence whose rows are split over devices, and merging what each computed.

The devices along a mesh axis hold equal shares of the rows, one share after the other. Late rows
attend to more keys than early ones if attention is causal, so with rows in order the last device
has most work. In zigzag order each device holds one early and one late chunk. Of packed documents
each device holds such chunks of every document. The data loader finds that order from the ids:

    order = sequence.balance(segment_ids, parts=8)  # NumPy
    tokens, ids = (sequence.reorder(x, 8, order=order) for x in (tokens, segment_ids))

Reorder whatever has one entry per token: tokens, targets, segment ids, and the positions that a
model turns into rotary embeddings, for which `positions` has the numbers.
"""

from attn_dispatch.semantics.merge import merged as merge
from attn_dispatch.sequence.balancing import Balance, balance
from attn_dispatch.sequence.order import Order, positions, reorder, restore

__all__ = [
    "Balance", "Order", "balance", "merge", "positions", "reorder", "restore",
]  # fmt: skip
