"""Which strategies can run a call whose sequence is spread over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from attn_dispatch.call.context import SequenceOrder, Strategy
from attn_dispatch.call.options import Meaning
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.settings import ContextParallel


@dataclass(frozen=True)
class Spread:
    """A call whose rows and keys are spread over devices."""

    meaning: Meaning
    operands: tuple[str, ...]
    queries: int
    """The rows of one device."""
    keys: int
    """The keys of one device."""
    devices: int
    order: SequenceOrder = "contiguous"
    needs_keep: bool = False
    heads: int = 0
    """The query heads of all devices."""

    @staticmethod
    def of(spec: AttentionSpec, devices: int, order: SequenceOrder) -> Spread | None:
        """A call spread over so many devices; None if rows or keys do not divide, and for
        calls with pages, without scores or on one device."""
        if devices == 1 or spec.is_paged or spec.is_empty:
            return None
        if spec.seq_len_q % devices or spec.seq_len_kv % devices:
            return None
        rows, keys = spec.seq_len_q // devices, spec.seq_len_kv // devices
        return Spread(
            spec.meaning,
            spec.options.operands,
            rows,
            keys,
            devices,
            order,
            needs_keep=spec.wanted.needs_keep,
            heads=spec.num_heads,
        )

    @property
    def has_diagonal(self) -> bool:
        """Whether positions of rows and keys in the sequence decide what a row sees."""
        return has_diagonal(self.meaning, self.operands)

    @property
    def is_causal(self) -> bool:
        """Whether no row sees keys after its own position, and rows and keys start together."""
        return not self.sees_later_keys and self.queries == self.keys

    @property
    def sees_later_keys(self) -> bool:
        """Whether a row may see keys after its own position."""
        return not self.meaning.is_causal and self.meaning.window[1] != 0


def has_diagonal(meaning: Meaning, operands: Iterable[str]) -> bool:
    """Whether causality, a window or ALiBi counts positions in the sequence."""
    is_band = meaning.is_causal or meaning.window != (None, None)
    return is_band or "alibi_slopes" in operands


_POSITIONS: dict[str, Callable[[Spread], bool]] = {
    "score_mod": lambda x: x.meaning.score_mod is not None,
    "mask_mod": lambda x: x.meaning.mask_mod is not None,
    "dropout": lambda x: x.meaning.dropout_rate > 0,
    "causal_alignment as a number": lambda x: (
        x.meaning.causal_alignment == "by_offset" or "causal_offset" in x.operands
    ),
}
_OPERANDS = {
    "page_table": "pages", "cu_seqlens_q": "cu_seqlens", "window": "a traced window",
    "query_seq_lengths": "query_seq_lengths", "key_value_seq_lengths": "key_value_seq_lengths",
}  # fmt: skip


def left_out(spread: Spread) -> list[str]:
    """What the call has that no strategy but heads takes."""
    named = [x for x, applies in _POSITIONS.items() if applies(spread)]
    return named + [text for name, text in _OPERANDS.items() if name in spread.operands]


def _left_out_of_gather(spread: Spread) -> list[str]:
    """What the call has that a gather does not take: lengths count in the order of the sequence."""
    given = spread
    if not spread.has_diagonal:
        taken = ["key_value_seq_lengths"]
        taken += ["query_seq_lengths"] if spread.order == "contiguous" else []
        given = replace(spread, operands=tuple(x for x in spread.operands if x not in taken))
    return left_out(given)


def _is_shifted(spread: Spread) -> bool:
    """Whether row i of a sequence or segment may line up with another key than its key i."""
    if not spread.has_diagonal:
        return False
    has_ids = "query_segment_ids" in spread.operands
    return (has_ids and not spread.meaning.same_lengths) or spread.queries != spread.keys


_NOT_OF_DOCUMENTS = Rule[Spread](
    "context/documents",
    lambda x: x.order == "documents",
    "a ring alone knows the order of documents",
)
HEADS = (
    _NOT_OF_DOCUMENTS,
    Rule[Spread](
        "context/heads/divide",
        lambda x: x.heads % x.devices != 0,
        "{devices} devices do not divide {heads} heads",
        facts=lambda x: {"devices": x.devices, "heads": x.heads},
    ),
)


def _features(named: Callable[[Spread], list[str]]) -> Rule[Spread]:
    return Rule[Spread](
        "context/features",
        lambda x: bool(named(x)) or x.needs_keep,
        "with {named}, only heads are exchanged",
        facts=lambda x: {"named": " and ".join(named(x)) or "the dropout mask as a result"},
    )


_BY_POSITION = (
    Rule[Spread](
        "context/alignment",
        _is_shifted,
        "rows and keys of a sequence must be known to line up: pass one array of segment ids for "
        "both, and as many keys as queries",
    ),
    Rule[Spread](
        "context/keys_after",
        lambda x: x.has_diagonal and x.sees_later_keys,
        "a window or ALiBi without causality reaches keys of later devices",
        remedy="is_causal=True",
    ),
)
COMMON = (_features(left_out), *_BY_POSITION)
RING = (
    *COMMON,
    Rule[Spread](
        "context/ring/window",
        lambda x: x.meaning.window != (None, None),
        "a ring sends all keys, of which a window hides most",
    ),
    Rule[Spread](
        "context/ring/positions",
        lambda x: bool(_per_pair(x)),
        "{named} differs from step to step",
        facts=lambda x: {"named": " and ".join(_per_pair(x))},
    ),
    Rule[Spread](
        "context/ring/halves",
        lambda x: x.has_diagonal and x.order != "documents" and x.queries % 2 != 0,
        "a causal ring gives a device two equal chunks, and {rows} rows are odd",
        facts=lambda x: {"rows": x.queries},
    ),
)
GATHER = (_features(_left_out_of_gather), *_BY_POSITION, _NOT_OF_DOCUMENTS)
HALO = (
    *COMMON,
    Rule[Spread](
        "context/halo/window",
        lambda x: not 1 <= (x.meaning.window[0] or 0) <= x.keys,
        "a halo needs a window of 1 to {keys} keys to the left",
        facts=lambda x: {"keys": x.keys},
    ),
    Rule[Spread](
        "context/halo/ids",
        lambda x: "query_segment_ids" in x.operands and x.meaning.max_segments is None,
        "segments may be in several pieces, between which a window reaches any distance",
        remedy="max_segments, with which each segment is in one piece",
    ),
    Rule[Spread](
        "context/halo/order",
        lambda x: x.order != "contiguous",
        "a halo needs rows in contiguous order",
    ),
    Rule[Spread](
        "context/halo/arrays",
        lambda x: "bias" in x.operands or "mask" in x.operands,
        "a bias or mask has columns for all keys",
    ),
)
STRATEGIES: Mapping[Strategy, tuple[Rule[Spread], ...]] = {
    "halo": HALO, "ring": RING, "gather": GATHER,
}  # fmt: skip
"""The rules by strategy, the one that sends least first."""


def _per_pair(spread: Spread) -> list[str]:
    return [x for x in ("bias", "mask", "alibi_slopes") if x in spread.operands]


def reasons(strategy: Strategy | Literal["heads"], spread: Spread) -> tuple[Reason, ...]:
    """Why a strategy does not run the call; none if it does."""
    return broken(HEADS if strategy == "heads" else STRATEGIES[strategy], spread)


def all_reasons(spread: Spread) -> dict[str, tuple[Reason, ...]]:
    """Why each strategy does not run the call, by its name."""
    return {x: reasons(x, spread) for x in ("heads", *STRATEGIES)}


def chosen(wanted: ContextParallel, spread: Spread) -> Strategy | None:
    """The strategy to run the call; None if none can.

    Args:
      wanted: the name of a strategy, which is taken if it can run the call; otherwise, and for
        "auto", the first of `STRATEGIES` that can is.
      spread: the call.
    """
    able = [x for x in STRATEGIES if not reasons(x, spread)]
    found = next((x for x in able if x == wanted), able[0] if able else None)
    return cast("Strategy | None", found)
