"""Which calls can leave keys or pages where they are while every device has all rows."""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.call.options import Meaning
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.context.strategies import Spread, has_diagonal, left_out
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.text import in_units

MOST_QUERIES = 16
"""The most causal queries of a row on pages: each reads the row's keys by itself."""

_LENGTHS = {"query_seq_lengths", "key_value_seq_lengths"}


@dataclass(frozen=True)
class WholeRows:
    """A call whose keys, or the pages of whose pool, are spread over devices."""

    spec: AttentionSpec
    devices: int
    batch_ways: int
    """The number of devices that split the batch, by other mesh axes."""

    @property
    def meaning(self) -> Meaning:
        return self.spec.meaning

    @property
    def refused(self) -> str:
        """What the call has that needs all keys in one place."""
        spread = Spread(self.meaning, self.spec.options.operands, 0, 0, self.devices)
        taken = _LENGTHS | {"pages"} if self.spec.is_paged else _LENGTHS
        return " and ".join(x for x in left_out(spread) if x not in taken)

    @property
    def has_diagonal(self) -> bool:
        return has_diagonal(self.meaning, self.spec.options.operands)

    @property
    def counts_distances(self) -> bool:
        """Whether a window or ALiBi counts how far keys are from a query."""
        return self.meaning.window != (None, None) or self.spec.has("alibi_slopes")

    @property
    def is_one_query_at_the_end(self) -> bool:
        """Whether a single query sees all keys, as when decoding."""
        is_at_end = self.meaning.causal_alignment == "bottom_right"
        return not self.counts_distances and self.spec.seq_len_q == 1 and is_at_end

    @property
    def does_not_divide(self) -> bool:
        if not self.spec.is_paged:
            return self.spec.seq_len_kv % self.devices != 0
        # A page of keys and its values are neighbours if they are in one pool.
        pages = self.spec.shape("key_pages")[1]
        return pages % (self.devices * (1 + self.meaning.value_page)) != 0

    @property
    def summed(self) -> int:
        """The bytes of results that devices sum, in float32, forward and back."""
        spec = self.spec
        return 4 * spec.batch * spec.seq_len_q * spec.num_heads * (spec.head_dim_v + 1)

    @property
    def gathered(self) -> int:
        """The elements of the keys and values that a device would receive otherwise, together with
        its own ones."""
        spec = self.spec
        dims = spec.num_kv_heads * (spec.head_dim + spec.head_dim_v)
        if spec.is_paged:
            pools, pages = spec.shape("key_pages")[:2]
            return self.batch_ways * pools * pages * spec.page_size * dims
        return spec.batch * spec.seq_len_kv * dims


_RULES = (
    Rule[WholeRows](
        "context/whole_rows/features",
        lambda x: bool(x.refused),
        "with {named}, keys are gathered",
        facts=lambda x: {"named": x.refused},
    ),
    Rule[WholeRows](
        "context/whole_rows/packed",
        lambda x: x.spec.has("query_segment_ids"),
        "segments are counted over all keys",
    ),
    Rule[WholeRows](
        "context/whole_rows/diagonal",
        lambda x: not x.spec.is_paged and x.has_diagonal and not x.is_one_query_at_the_end,
        "a diagonal of several rows, a window or ALiBi counts over all keys",
    ),
    Rule[WholeRows](
        "context/whole_rows/distances",
        lambda x: x.spec.is_paged and x.counts_distances,
        "a window or ALiBi counts over the pages of all devices",
    ),
    Rule[WholeRows](
        "context/whole_rows/queries",
        lambda x: x.spec.is_paged and x.meaning.is_causal and x.spec.seq_len_q > MOST_QUERIES,
        "each of several causal queries reads the pages by itself, at most {most}, not {queries}",
        facts=lambda x: {"most": MOST_QUERIES, "queries": x.spec.seq_len_q},
    ),
    Rule[WholeRows](
        "context/whole_rows/divide",
        lambda x: x.does_not_divide,
        "{devices} devices do not divide the keys, or the pages of a pool",
        facts=lambda x: {"devices": x.devices},
    ),
    Rule[WholeRows](
        "context/whole_rows/bytes",
        lambda x: x.summed * x.devices >= x.gathered * (x.devices - 1),
        "results that devices would sum, {summed}, are no less than the keys",
        facts=lambda x: {"summed": in_units(x.summed)},
    ),
)


def reasons(spec: AttentionSpec, devices: int, batch_ways: int = 1) -> tuple[Reason, ...]:
    """Why devices cannot each attend from all rows to their own keys or pages; none if they can.

    Args:
      spec: the whole call, which has scores.
      devices: the number of devices that hold keys, or parts of a pool of pages.
      batch_ways: the number of devices that split the batch, by other mesh axes.
    """
    return broken(_RULES, WholeRows(spec, devices, batch_ways))
