"""The static facts of an attention call except its shapes: the one parameter of the primitive.

The parts differ in how long they hold. What the caller means holds in every derivative, and in
every rewrite that does not express it in another way. The wanted results change with the direction.
The settings of the call hold until it is lowered, where they are put in force. The promises of a
rewrite, and the engine that tuning chose, hold only while one implementation is asked about one
call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import jax.numpy as jnp

from attn_dispatch.call.context import Context
from attn_dispatch.call.operands import mod_operands, with_role
from attn_dispatch.programs.program import ModProgram
from attn_dispatch.settings import CallSettings

CausalAlignment = Literal["top_left", "bottom_right"]
Alignment = Literal["top_left", "bottom_right", "by_offset"]


@dataclass(frozen=True)
class Meaning:
    """What the caller means, without shapes and arrays."""

    scale: float
    is_causal: bool = False
    causal_alignment: Alignment = "top_left"
    causal_offset: int = 0
    """With causal_alignment "by_offset": query i is level with key i + causal_offset. 0 if the
    operand `causal_offset` holds the number."""
    window: tuple[int | None, int | None] = (None, None)
    """The keys that a query may see to its (left, right), inclusive; None is open. (None, None) if
    the operand `window` holds both sides."""
    logits_soft_cap: float | None = None
    max_segments: int | None = None
    """With segment ids: the largest id; a larger one is invalid. None: not known."""
    max_seq_lens: tuple[int, int] | None = None
    """With cu_seqlens, or with segment ids and max_segments: the longest sequence of queries and of
    keys. None: not known."""
    same_lengths: bool = False
    """Whether every sequence is known to have as many keys as queries; see
    `arguments.arguments_of`."""
    dropout_rate: float = 0.0
    dropout_impl: str | None = None
    """The name of the PRNG implementation of dropout_key's words."""
    deterministic_backward: bool = False
    finite_padding: bool = False
    """Padding rows of query, key, value and out_grad hold finite numbers, and out does too, because
    no row is invalid. So kernels need not clear them. Also True where the call has no padding."""
    score_mod: ModProgram | None = None
    """Applied to scores after the soft cap, before bias, ALiBi and masks."""
    mask_mod: ModProgram | None = None
    """True where the pair may attend, if the other masks allow it too."""
    heads_first_q: bool = False
    """Whether query, out and their gradients are [B, N, T, ·] in memory; shapes here are the same
    either way. Kernels that know the order read and write it; XLA makes copies for others."""
    heads_first_kv: bool = False
    """Whether key, value and their gradients are [B, K, S, ·] in memory; pages: [P, K, page, ·]."""
    implementation: tuple[str, ...] = ()
    """The caller's preference list; empty means the best available for the platform."""
    context: Context | None = None
    """In a shard_map: how the call's sequences are spread over devices. The shapes are those of one
    device."""
    value_page: int = 0
    """In a paged call: the values of a page of keys are this many pages further on; 0 if keys and
    values are in separate arrays."""

    @cached_property
    def mods(self) -> dict[str, ModProgram]:
        """The score_mod and mask_mod that the call has, by name."""
        mods = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return {name: program for name, program in mods.items() if program is not None}


@dataclass(frozen=True)
class Wanted:
    """The wanted results, and their direction."""

    needs_lse: bool = False
    """Forward: lse is wanted, by the caller or as a residual."""
    needs_max: bool = False
    """Forward: row_max is wanted; implies needs_lse."""
    needs_keep: bool = False
    """Forward: the dropout mask is wanted, True where a pair is kept."""
    differentiated: tuple[str, ...] = ()
    """Forward: the operands whose gradients a backward pass will want. Only warnings of a fallback
    depend on it."""
    gradients: tuple[str, ...] = ()
    """Backward: the operands whose gradient is wanted. Empty in the forward pass."""
    derivative: str | None = None
    """A derivative, if it is wanted instead of the call or its gradients: FORWARD_MODE, or one of
    core/formulas.py that no kernel computes."""
    partner: AttentionOptions | None = None
    """With dropout, where gradients are wanted: the options of the call of the other direction.
    One implementation must compute both, because each implementation draws a different mask."""


FORWARD_MODE = "forward-mode derivative"
"""The tangents of out and lse, of a call on one device."""

TRAINING = Wanted(needs_lse=True)
"""What a forward pass returns for its backward pass."""


@dataclass(frozen=True)
class Promises:
    """What a rewrite guarantees the implementation that it asks; a caller guarantees nothing."""

    whole_pages: bool = False
    """In a paged call: lengths are multiples of the page size, and past a length the table names
    pages of the same row, which kernels may read."""
    is_checked: bool = False
    """Lengths and page tables are valid: they make no row invalid."""
    ignores_padding_rows: bool = False
    """Forward: out of padding rows may be anything, also NaN; their lse is -inf. So implementations
    need not clear these rows after a kernel."""
    cleared_padding: bool = False
    """Padding rows of query, key, value and out_grad are 0; rows of out may be invalid."""
    is_part: bool = False
    """Backward: the keys are a part of those that out and lse are of, so that the probabilities of
    a row do not sum to 1."""


@dataclass(frozen=True)
class AttentionOptions:
    """Everything static about a call except its shapes."""

    operands: tuple[str, ...]
    """Names of the arrays, in the order in which the primitive takes them."""
    meaning: Meaning
    wanted: Wanted = Wanted()
    promises: Promises = Promises()
    engine: str = ""
    """The implementation's engine that tuning found to be faster than its default, in the words of
    the implementation; "" is the default."""
    settings: CallSettings = field(default=CallSettings(), repr=False)
    """What the `with` blocks around the call set."""

    @property
    def without_settings(self) -> AttentionOptions:
        """The options where the settings of the call are in force."""
        if not self.settings.changes:
            return self
        wanted, partner = self.wanted, self.wanted.partner
        if partner is not None:
            wanted = replace(wanted, partner=partner.without_settings)
        return replace(self, wanted=wanted, settings=CallSettings())

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The operands that have gradients, in their order."""
        score_mod = self.meaning.score_mod
        arrays = () if score_mod is None else score_mod.arrays
        names = mod_operands("score_mod", len(arrays))
        floating = {
            name
            for name, (_, dtype) in zip(names, arrays, strict=True)
            if jnp.issubdtype(dtype, jnp.floating)
        }
        return tuple(x for x in self.operands if x in DIFFERENTIABLE or x in floating)

    @property
    def forward(self) -> AttentionOptions:
        """The options of the forward call in training, which returns lse: of this call or, if it is
        a backward call, of the one that it belongs to."""
        return replace(self, operands=forward_operands(self.operands), wanted=TRAINING)

    def returning(self, wanted: Wanted) -> AttentionOptions:
        """The options of the same call with these results."""
        return replace(self, wanted=wanted)


RESIDUALS = with_role("residual")
"""The operands that only backward calls have."""

DIFFERENTIABLE = with_role("differentiable")
"""The operands that have gradients, beside the arrays that a score_mod reads."""


def forward_operands(operands: tuple[str, ...]) -> tuple[str, ...]:
    """The operands of the forward call, from those of a forward or backward call."""
    return tuple(x for x in operands if x not in RESIDUALS)


def backward_options(
    options: AttentionOptions, gradients: tuple[str, ...], *, has_lse_grad: bool
) -> AttentionOptions:
    """The options of the backward call that belongs to a forward call.

    Its operands are the forward call's, then out, lse, out_grad and, if there is one, lse_grad.
    """
    residuals = RESIDUALS if has_lse_grad else RESIDUALS[:-1]
    wanted = Wanted(needs_lse=options.wanted.needs_lse, gradients=gradients)
    return replace(options, operands=options.operands + residuals, wanted=wanted)


def as_partners(
    forward: AttentionOptions, backward: AttentionOptions
) -> tuple[AttentionOptions, AttentionOptions]:
    """Both options; with dropout, each has the other as its partner."""
    if not forward.meaning.dropout_rate:
        return forward, backward
    return (
        forward.returning(replace(forward.wanted, partner=backward)),
        backward.returning(replace(backward.wanted, partner=forward)),
    )


def both_options(
    options: AttentionOptions, gradients: tuple[str, ...], *, has_lse_grad: bool
) -> tuple[AttentionOptions, AttentionOptions]:
    """The options of the forward call, which keeps its lse, and of the backward call."""
    wanted = replace(options.wanted, needs_lse=True, differentiated=gradients, partner=None)
    forward = options.returning(wanted)
    return as_partners(forward, backward_options(forward, gradients, has_lse_grad=has_lse_grad))


def with_dropout_start(options: AttentionOptions) -> AttentionOptions:
    """The options with dropout_start among the operands, after dropout_key."""
    if "dropout_start" in options.operands:
        return options
    at = options.operands.index("dropout_key") + 1
    operands = (*options.operands[:at], "dropout_start", *options.operands[at:])
    partner, wanted = options.wanted.partner, options.wanted
    if partner is not None:
        wanted = replace(wanted, partner=with_dropout_start(partner))
    return replace(options, operands=operands, wanted=wanted)


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
