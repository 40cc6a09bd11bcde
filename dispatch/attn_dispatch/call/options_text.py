"""The options of a call in words, as messages and `explain` print them."""

from __future__ import annotations

from collections.abc import Callable

from attn_dispatch.call.options import Meaning, Wanted


def options_text(meaning: Meaning, wanted: Wanted) -> list[str]:
    """A text for the scale, and for each other option that differs from its default."""
    texts = (option(meaning, wanted) for option in _OPTIONS)
    return [text for text in texts if text]


def _where(is_given: bool, text: str) -> str:
    return text if is_given else ""


def _order_of_axes(meaning: Meaning, wanted: Wanted) -> str:
    orders = {"queries": meaning.heads_first_q, "keys": meaning.heads_first_kv}
    sides = " and ".join(side for side, is_first in orders.items() if is_first)
    return _where(bool(sides), f"heads first in {sides}")


def _alignment(meaning: Meaning) -> str:
    if meaning.causal_alignment != "by_offset":
        return meaning.causal_alignment
    return f"by_offset {meaning.causal_offset}" if meaning.causal_offset else "by_offset"


def _mods(meaning: Meaning, wanted: Wanted) -> str:
    return ", ".join(f"{name} {program}" for name, program in meaning.mods.items())


_OPTIONS: tuple[Callable[[Meaning, Wanted], str], ...] = (
    lambda m, w: f"scale={m.scale:.6g}",
    lambda m, w: _where(m.is_causal, f"causal {_alignment(m)}"),
    lambda m, w: _where(not m.is_causal and m.causal_alignment == "by_offset", _alignment(m)),
    lambda m, w: _where(m.window != (None, None), f"window={m.window}"),
    lambda m, w: "" if m.logits_soft_cap is None else f"logits_soft_cap={m.logits_soft_cap:g}",
    lambda m, w: _where(m.max_segments is not None, f"max_segments={m.max_segments}"),
    lambda m, w: _where(m.max_seq_lens is not None, f"max_seq_lens={m.max_seq_lens}"),
    lambda m, w: _where(m.dropout_rate > 0, f"dropout_rate={m.dropout_rate:g}"),
    lambda m, w: _where(m.deterministic_backward, "deterministic_backward"),
    lambda m, w: _where(m.finite_padding, "finite_padding"),
    _order_of_axes,
    _mods,
    lambda m, w: _where(w.needs_max, "row maximum"),
    lambda m, w: _where(w.needs_keep, "dropout mask"),
    lambda m, w: w.derivative or "",
    lambda m, w: _where(m.value_page > 0, "keys and values in one pool"),
    lambda m, w: _where(bool(w.gradients), f"gradients of {'/'.join(w.gradients)}"),
)
"""The text of each option, in the order of the whole; "" where it has its default."""
