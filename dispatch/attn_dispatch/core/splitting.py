"""Which mesh axes split a call, from how query and the keys are sharded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from attn_dispatch import settings
from attn_dispatch.call.context import Context, SequenceOrder, Strategy
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.operands import listed
from attn_dispatch.core.context import whole_rows
from attn_dispatch.core.context.strategies import Spread, chosen
from attn_dispatch.core.context.strategy_costs import cheapest, modelled
from attn_dispatch.core.shards import Shards, entry, key_operand
from attn_dispatch.settings import ContextParallel


def split(
    call: LeadingCall,
    sizes: Mapping[str, int],
    query: P,
    key: P,
    *,
    wanted: ContextParallel | None = None,
    context: Context | None = None,
) -> Shards:
    """Split the call as query is, where the axes divide it; where query is whole, as key is.

    An axis that splits query along its length splits rows and keys if the setting
    `context_parallel` says so. Otherwise, and if it splits another dim, it splits the heads
    instead, or else the first leading dim that it divides, or else rows and keys.

    Args:
      call: the whole call.
      sizes: every mesh axis and its number of devices.
      query: the spec of query.
      key: the spec of the operand `key_operand`.
      wanted: what replaces the setting.
      context: how rows and keys are spread in a shard_map. There the devices exchange arrays, not
        the partitioner, and only the last axes are exchanged: devices along them hold rows that
        are next to each other.
    """
    splitting = _Splitting(call, sizes, wanted or settings.current().context_parallel, context)
    spec, number = call.spec, len(call.dims)
    kv_heads_dim = listed(key_operand(call)).axes.index("k") - 1 + number
    *leading, rows, heads, dims = (entry(query, i) for i in range(number + 3))
    given = sum(leading, ()) + rows + heads + dims
    if not any(leading):
        taken = rows + heads + dims
        leading = [tuple(x for x in entry(key, i) if x not in taken) for i in range(number)]
    taken = sum(leading, ()) + rows + dims
    heads = heads or tuple(x for x in entry(key, kv_heads_dim) if x not in taken)
    ways = math.prod(map(splitting.ways, leading)), splitting.ways(heads)
    spread, strategy = splitting.spread(rows, ways)
    # Rows in the order of documents stay where they are, whatever heads and leading dims are.
    others = tuple(x for x in rows + dims if x not in spread and not splitting.is_by_document)
    heads = splitting.dividing(heads + splitting.last_dividing(heads, others), spec.num_heads)
    leading = [splitting.dividing(*x) for x in zip(leading, call.dims, strict=True)]
    splitting.split_leading(leading, tuple(x for x in others if x not in heads))
    kv_heads = splitting.dividing(heads, spec.num_kv_heads)
    if not spread:
        taken = (*sum(leading, ()), *heads)
        rest = tuple(x for x in rows if x not in taken and sizes[x] > 1)
        spread, strategy = splitting.spread(rest, ways, is_rest=True)
    used = {*sum(leading, ()), *heads, *spread}
    along_keys = tuple(x for x in entry(key, number) if x not in used and x not in given)
    keys = splitting.keys_alone(along_keys, ways[0]) if not rows else ()
    if keys:
        strategy = "pages" if spec.is_paged else "keys"
    return Shards(
        sizes=tuple(sizes.items()),
        leading=tuple(leading),
        kv_heads=kv_heads,
        groups=heads[len(kv_heads) :],
        unused=tuple((x, sizes[x]) for x in given if x not in used and sizes[x] > 1),
        rows=spread,
        strategy=strategy,
        order=splitting.order,
        keys=keys,
    )


@dataclass(frozen=True)
class _Splitting:
    """The steps of `split`."""

    call: LeadingCall
    sizes: Mapping[str, int]
    wanted: ContextParallel
    context: Context | None

    @property
    def order(self) -> SequenceOrder:
        return "contiguous" if self.context is None else self.context.order

    @property
    def is_by_document(self) -> bool:
        return self.order == "documents"

    def ways(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def dividing(self, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        """The leading mesh axes that together divide `size`."""
        while size % self.ways(axes):
            axes = axes[:-1]
        return axes

    def last_dividing(self, heads: tuple[str, ...], rows: tuple[str, ...]) -> tuple[str, ...]:
        """The last axes of `rows` that, together with `heads`, divide the number of heads.

        Devices along the last axes hold rows that are next to each other. So if they exchange
        heads, the rows along the others stay in one piece.
        """
        firsts = (rows[first:] for first in range(len(rows)))
        number = self.call.spec.num_heads
        return next((x for x in firsts if number % self.ways(heads + x) == 0), ())

    def split_leading(self, leading: list[tuple[str, ...]], axes: tuple[str, ...]) -> None:
        """Let each axis split the first leading dim that it divides."""
        for axis in axes if self.context is None else reversed(axes):
            for i, size in enumerate(self.call.dims):
                more = (*leading[i], axis) if self.context is None else (axis, *leading[i])
                if size % self.ways(more) == 0:
                    leading[i] = more
                    break
            else:
                if self.context is not None:
                    break

    def spread(
        self, rows: tuple[str, ...], ways: tuple[int, int], *, is_rest: bool = False
    ) -> tuple[tuple[str, ...], Strategy | None]:
        """The axes that split rows and keys, and the strategy.

        There are none if heads are exchanged, or if no strategy can run the call.

        Args:
          rows: the axes that split query's length.
          ways: the numbers of devices that split the batch and the heads, by other axes.
          is_rest: whether neither heads nor leading dims divide over these axes.
        """
        spec, devices = self.call.spec, self.ways(rows)
        spread = Spread.of(spec, devices, self.order)
        # JAX numbers the devices of a permute in the order of the mesh.
        is_in_order = rows == tuple(x for x in self.sizes if x in rows)
        if spread is None or self.wanted == "heads" or not is_in_order:
            return (), None
        strategy = chosen(self.wanted, spread)
        if strategy != self.wanted and not (is_rest or self.is_by_document):
            batch, heads = ways
            costs = modelled(spec, spread, batch_ways=batch, head_ways=heads)
            strategy = cheapest(x for x in costs if x.mesh_axes <= len(rows))
        return ((), None) if strategy is None else (rows, strategy)

    def keys_alone(self, axes: tuple[str, ...], batch_ways: int) -> tuple[str, ...]:
        """The axes that split keys or pages while rows are whole, if devices then receive less."""
        devices, spec = self.ways(axes), self.call.spec
        if devices == 1 or spec.is_empty or self.wanted == "heads" or self.context is not None:
            return ()
        return () if whole_rows.reasons(spec, devices, batch_ways) else axes
