"""The static facts of an attention call but for its shapes: the primitive's one parameter.

They are in parts by how long they hold. What the caller means stays through every derivative and
every rewrite that does not express it otherwise. Which results are wanted changes with the
direction. What a rewrite promises, and the engine that tuning chose, hold for one question to one
implementation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import jax.numpy as jnp

from attn_dispatch.programs.program import ModProgram

CausalAlignment = Literal["top_left", "bottom_right"]


@dataclass(frozen=True)
class Meaning:
    """What the caller means, shapes and arrays left out."""

    scale: float
    is_causal: bool = False
    causal_alignment: CausalAlignment = "top_left"
    window: tuple[int | None, int | None] = (None, None)
    """Keys a query may see to its (left, right), inclusive; None is open. (None, None) with the
    operand `window`, which holds both sides."""
    logits_soft_cap: float | None = None
    max_segments: int | None = None
    """With segment ids: the largest id; a larger one is wrong. None: not known."""
    max_seq_lens: tuple[int, int] | None = None
    """With cu_seqlens, or with segment ids and max_segments: the longest sequence of queries and of
    keys. None: not known."""
    same_lengths: bool = False
    """Every sequence has as many keys as queries: one array of lengths, ids or cu_seqlens was given
    for both."""
    dropout_rate: float = 0.0
    dropout_impl: str | None = None
    """Name of the PRNG implementation that dropout_key's words belong to."""
    deterministic_backward: bool = False
    score_mod: ModProgram | None = None
    """Applied to scores after the soft cap, before bias, ALiBi and masks."""
    mask_mod: ModProgram | None = None
    """True where the pair may attend, the other masks allowing."""
    heads_first_q: bool = False
    """In which order query, out and their gradients lie in memory, which no shape here says: as
    [B, N, T, ·]. Kernels that know the order read and write it; to others XLA hands copies."""
    heads_first_kv: bool = False
    """Likewise key, value and their gradients, as [B, K, S, ·], or pages, as [P, K, page, ·]."""
    implementation: tuple[str, ...] = ()
    """The caller's preference list; empty means the best available for the platform."""
    value_page: int = 0
    """Of a paged call: values lie in the page of value_pages so many after that of their keys."""

    @cached_property
    def mods(self) -> dict[str, ModProgram]:
        """score_mod and mask_mod, as far as there are any, by name."""
        mods = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return {name: program for name, program in mods.items() if program is not None}


@dataclass(frozen=True)
class Wanted:
    """Which results are wanted, of which direction."""

    needs_lse: bool = False
    """Forward: lse is wanted, by the caller or as a residual."""
    needs_max: bool = False
    """Forward: row_max is wanted; implies needs_lse."""
    needs_keep: bool = False
    """Forward: the dropout keep mask is wanted."""
    differentiated: tuple[str, ...] = ()
    """Forward: the operands whose gradients a backward pass will want, which nothing but what is
    said of a fallback depends on."""
    gradients: tuple[str, ...] = ()
    """Backward: the operands whose gradient is wanted. Empty means this is the forward pass."""
    derivative: str | None = None
    """What is to be computed if not the call or its gradients: which other derivative of it."""
    partner: AttentionOptions | None = None
    """With dropout, where gradients are wanted: the options of the call of the other direction.
    Whatever computes the one must compute the other, because each draws a mask of its own."""


TRAINING = Wanted(needs_lse=True)
"""What a forward pass returns for its backward pass."""


@dataclass(frozen=True)
class Promises:
    """What a rewrite promises the implementation that it asks; a caller promises nothing."""

    whole_pages: bool = False
    """Of a paged call: lengths are those of whole pages, and past a length a row's table names
    pages of its own, which kernels may read."""
    is_checked: bool = False
    """Lengths and page tables are right: no row is wrong for what they say."""
    ignores_padding_rows: bool = False
    """Forward: out of padding rows may be anything, also NaN; their lse is -inf. So implementations
    need not clear these rows after a kernel."""


@dataclass(frozen=True)
class AttentionOptions:
    """Everything static about a call except its shapes."""

    operands: tuple[str, ...]
    """Names of the arrays, in the order in which the primitive takes them."""
    meaning: Meaning
    wanted: Wanted = Wanted()
    promises: Promises = Promises()
    engine: str = ""
    """Which engine of the implementation's, in its own words, where tuning found one that is faster
    than what it takes by itself."""

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
        """The options of the training call that these are or belong to, whatever is wanted."""
        return replace(self, operands=forward_operands(self.operands), wanted=TRAINING)

    def returning(self, wanted: Wanted) -> AttentionOptions:
        """The options of the same call with these results."""
        return replace(self, wanted=wanted)


RESIDUALS = ("out", "lse", "out_grad", "lse_grad")
"""The operands that backward calls alone have."""

DIFFERENTIABLE = ("query", "key", "value", "bias", "alibi_slopes", "sinks")
"""The operands that have gradients, beside what a score_mod reads."""

_MOD_OPERAND = re.compile(r"(score|mask)_mod_\d+")


def mod_operands(mod: str, count: int) -> tuple[str, ...]:
    """The names of the arrays that a mod reads."""
    return tuple(f"{mod}_{i}" for i in range(count))


def is_mod_operand(name: str) -> bool:
    """Whether an operand is an array that a mod reads."""
    return _MOD_OPERAND.fullmatch(name) is not None


def forward_operands(operands: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the forward call that a forward or backward call is or belongs to."""
    return tuple(x for x in operands if x not in RESIDUALS)


def backward_options(
    options: AttentionOptions, gradients: tuple[str, ...], *, has_lse_grad: bool
) -> AttentionOptions:
    """The options of the backward call that belongs to a forward call.

    Its operands are the forward's, then out, lse and out_grad, then lse_grad where there is one.
    """
    residuals = RESIDUALS if has_lse_grad else RESIDUALS[:-1]
    wanted = Wanted(needs_lse=options.wanted.needs_lse, gradients=gradients)
    return replace(options, operands=options.operands + residuals, wanted=wanted)


def as_partners(
    forward: AttentionOptions, backward: AttentionOptions
) -> tuple[AttentionOptions, AttentionOptions]:
    """The two as options of calls of which each knows the other, where that matters: in dropout."""
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
