"""The facts of one attention call: options the caller fixed, and the spec they make with shapes.

Letters used for shapes here and everywhere: B batch, T query length, S key length, N heads,
K kv heads, G = N // K, H head dim of query and key, V head dim of value.

The arrays of a call are its *operands*, named in `AttentionOptions.operands`. Where a call is
computed every operand starts with a batch axis, which is made of the leading dims (leading.py):

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

A paged call has key_pages, value_pages and page_table in the place of key and value, and S is
M · page: key s of batch row b is key s % page of page page_table[b, s // page], of the pages of
pool b // (B / C); its value is in page page_table[b, s // page] + value_page. It has
key_value_seq_lengths, and no gradients; entries of the table past a length mean nothing.

The last rows above belong to the backward pass alone: `lse_grad` only where lse was returned, and
`keep` in the place of dropout_key and dropout_start where XLA goes back under another's mask.
Row d of dropout_key draws the mask of the B / D consecutive batch rows starting at d·B/D. Where the
call is one device's part of a larger one, dropout_start has for each key which of the key's batch
rows, and which head, come first here. Likewise row c of what score_mod and mask_mod read is that of
B / C consecutive batch rows, which b counts; mods_start has what b and n begin with.

Forward returns, in this order and as far as the options ask for them:

======= ============ =========== =================================================================
result  shape        dtype
======= ============ =========== =================================================================
out     [B, T, N, V] the call's
lse     [B, N, T]    `lse_dtype` log of the softmax denominator, sink included
row_max [B, N, T]    `lse_dtype` largest score the row may attend, sink left out: after scale, soft
                                 cap, bias, ALiBi and mask; -inf where it attends nothing
keep    [B, N, T, S] bool        True where dropout keeps a pair (everywhere without dropout);
                                 unspecified where the pair may not attend
======= ============ =========== =================================================================

out and lse are differentiable, row_max and keep are not. Backward returns the gradients wanted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp

from attn_dispatch.programs.program import ModProgram

CausalAlignment = Literal["top_left", "bottom_right"]


@dataclass(frozen=True)
class AttentionOptions:
    """What the caller fixed, shapes left out: the primitive's one static parameter."""

    operands: tuple[str, ...]
    """Names of the arrays, in the order in which the primitive takes them."""
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
    whole_pages: bool = False
    """Of a paged call: lengths are those of whole pages, and past a length a row's table names
    pages of its own, which kernels may read. Only in what a rewrite asks an implementation."""
    is_checked: bool = False
    """Lengths and page tables are right: no row is wrong for what they say. Only in what a rewrite
    that has made them right asks an implementation."""
    ignores_dead_rows: bool = False
    """Forward: out of rows that attend nothing may be anything, NaN too; their lse is -inf. Only in
    what a rewrite asks an implementation, and of use to those that clear rows after a kernel."""
    engine: str = ""
    """Which engine of the implementation's, in its own words, where tuning found one that is faster
    than what it takes by itself: only in what `core/select` asks an implementation."""
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

    @property
    def mods(self) -> dict[str, ModProgram]:
        """score_mod and mask_mod, as far as there are any, by name."""
        mods = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return {name: program for name, program in mods.items() if program is not None}

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The operands that have gradients, in their order."""
        arrays = () if self.score_mod is None else self.score_mod.arrays
        names = mod_operands("score_mod", len(arrays))
        floating = {
            name
            for name, (_, dtype) in zip(names, arrays, strict=True)
            if jnp.issubdtype(dtype, jnp.floating)
        }
        return tuple(x for x in self.operands if x in DIFFERENTIABLE or x in floating)


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


def backward_options(
    options: AttentionOptions, gradients: tuple[str, ...], *, has_lse_grad: bool
) -> AttentionOptions:
    """The options of the backward call that belongs to a forward call.

    Its operands are the forward's, then out, lse and out_grad, then lse_grad where there is one.
    """
    residuals = RESIDUALS if has_lse_grad else RESIDUALS[:-1]
    return replace(
        options,
        operands=options.operands + residuals,
        needs_max=False,
        needs_keep=False,
        differentiated=(),
        gradients=gradients,
    )


def as_partners(
    forward: AttentionOptions, backward: AttentionOptions
) -> tuple[AttentionOptions, AttentionOptions]:
    """The two as options of calls of which each knows the other, where that matters: in dropout."""
    if not forward.dropout_rate:
        return forward, backward
    return replace(forward, partner=backward), replace(backward, partner=forward)


def both_options(
    options: AttentionOptions, gradients: tuple[str, ...], *, has_lse_grad: bool
) -> tuple[AttentionOptions, AttentionOptions]:
    """The options of the forward call, which keeps its lse, and of the backward call."""
    forward = replace(options, needs_lse=True, differentiated=gradients, partner=None)
    return as_partners(forward, backward_options(forward, gradients, has_lse_grad=has_lse_grad))


def with_dropout_start(options: AttentionOptions) -> AttentionOptions:
    """The options with dropout_start among the operands, after dropout_key."""
    if "dropout_start" in options.operands:
        return options
    at = options.operands.index("dropout_key") + 1
    operands = (*options.operands[:at], "dropout_start", *options.operands[at:])
    partner = None if options.partner is None else with_dropout_start(options.partner)
    return replace(options, operands=operands, partner=partner)


@dataclass(frozen=True)
class Operand:
    """Static shape and dtype name of one array of the call."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class AttentionSpec:
    """Every static fact of one forward or backward attention call; hashable.

    Made by `of` alone, so that a local shard, a vmapped call and the caller's own arrays all
    derive their facts the same way.
    """

    options: AttentionOptions
    operands: tuple[Operand, ...]

    @staticmethod
    def of(avals: Sequence[Any], options: AttentionOptions) -> AttentionSpec:
        """The spec of a call with these abstract values, in the order of `options.operands`."""
        if len(avals) != len(options.operands):
            raise ValueError(
                f"expected {len(options.operands)} operands {options.operands}, got {len(avals)}"
            )
        operands = tuple(
            Operand(name, tuple(aval.shape), jnp.dtype(aval.dtype).name)
            for name, aval in zip(options.operands, avals, strict=True)
        )
        return AttentionSpec(options, operands)

    @property
    def partner(self) -> AttentionSpec | None:
        """The call of the other direction that must be computed by whatever computes this one."""
        options = self.options.partner
        if options is None:
            return None
        if self.is_backward:
            return AttentionSpec(options, self.operands[: len(options.operands)])
        return self.backward(options)

    def backward(self, options: AttentionOptions) -> AttentionSpec:
        """The backward call with these options that belongs to this forward call."""
        out = ((self.batch, self.seq_len_q, self.num_heads, self.head_dim_v), self.dtype)
        lse = ((self.batch, self.num_heads, self.seq_len_q), self.lse_dtype)
        residuals = {"out": out, "lse": lse, "out_grad": out, "lse_grad": lse}
        names = options.operands[len(self.operands) :]
        return AttentionSpec(
            options, self.operands + tuple(Operand(name, *residuals[name]) for name in names)
        )

    def expected_backward(self) -> AttentionSpec | None:
        """The backward call that a forward call will have, if it is differentiated in reverse mode
        and nothing comes back by its lse."""
        options = self.options
        if self.is_backward or options.derivative is not None or not options.differentiated:
            return None
        wanted = options.differentiated
        return self.backward(
            options.partner or backward_options(options, wanted, has_lse_grad=False)
        )

    def in_training(
        self, wanted: tuple[str, ...], *, has_lse_grad: bool = False
    ) -> tuple[AttentionSpec, AttentionSpec]:
        """What this forward call becomes where these operands are differentiated: the forward call
        that keeps its lse, and the backward call."""
        forward, backward = both_options(self.options, wanted, has_lse_grad=has_lse_grad)
        return AttentionSpec(forward, self.operands), self.backward(backward)

    @cached_property
    def _by_name(self) -> dict[str, Operand]:
        return {operand.name: operand for operand in self.operands}

    def has(self, name: str) -> bool:
        """Whether the call has this operand."""
        return name in self._by_name

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an operand the call has."""
        return self._by_name[name].shape

    def dtype_of(self, name: str) -> str:
        """Name of the dtype of an operand the call has."""
        return self._by_name[name].dtype

    @property
    def is_backward(self) -> bool:
        return bool(self.options.gradients)

    @property
    def dtype(self) -> str:
        """Name of the dtype of query, key, value and the output."""
        return self._by_name["query"].dtype

    @property
    def lse_dtype(self) -> str:
        """float32, or float64 for float64 inputs, whose gradients would lose digits else."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def batch(self) -> int:
        return self.shape("query")[0]

    @property
    def seq_len_q(self) -> int:
        return self.shape("query")[1]

    @property
    def num_heads(self) -> int:
        return self.shape("query")[2]

    @property
    def head_dim(self) -> int:
        return self.shape("query")[3]

    @property
    def is_paged(self) -> bool:
        """Whether keys and values lie in pages."""
        return self.has("page_table")

    @property
    def page_size(self) -> int:
        """Keys in a page, of a paged call."""
        return self.shape("key_pages")[2]

    @property
    def seq_len_kv(self) -> int:
        if self.is_paged:
            return self.shape("page_table")[1] * self.page_size
        return self.shape("key")[1]

    @property
    def num_kv_heads(self) -> int:
        return self.shape("key_pages" if self.is_paged else "key")[-2]

    @property
    def head_dim_v(self) -> int:
        return self.shape("value_pages" if self.is_paged else "value")[-1]

    @property
    def band(self) -> tuple[int | None, int | None]:
        """Keys seen to the left and right of the diagonal, causality included; None is open.

        A side as wide as both lengths together hides nothing and is open; what is left cannot
        overflow int32.
        """
        left, right = self.options.window
        if self.options.is_causal:
            right = 0
        widest = self.seq_len_q + self.seq_len_kv
        if self.has_symbolic_length:
            # Nobody knows whether it hides anything; no length is near 2^30.
            left, right = (None if side is None else min(side, 2**30) for side in (left, right))
            return left, right
        return (
            None if left is None or left >= widest else left,
            None if right is None or right >= widest else right,
        )

    @property
    def symbols(self) -> tuple[str, ...]:
        """The dims that are symbols of `jax.export`, of which Python knows no number."""
        dims = (dim for operand in self.operands for dim in operand.shape)
        return tuple(dict.fromkeys(str(dim) for dim in dims if not isinstance(dim, int)))

    @property
    def has_symbolic_length(self) -> bool:
        """Whether T or S is such a symbol."""
        return not (isinstance(self.seq_len_q, int) and isinstance(self.seq_len_kv, int))

    @property
    def is_empty(self) -> bool:
        """Whether there are no scores. A head dim of zero is no reason: its scores are all 0."""
        keys = self.shape("key_pages")[:4] if self.is_paged else self.shape("key")[:3]
        return 0 in self.shape("query")[:3] + keys + (self.seq_len_kv,)

    @property
    def result_names(self) -> tuple[str, ...]:
        """Forward: "out" and what else the options ask for; backward: `options.gradients`."""
        o = self.options
        if self.is_backward:
            return o.gradients
        extra = {"lse": o.needs_lse, "row_max": o.needs_max, "keep": o.needs_keep}
        return ("out", *(name for name, wanted in extra.items() if wanted))

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What the call returns: those of `result_names`, in that order."""
        if self.is_backward:
            return tuple(
                jax.ShapeDtypeStruct(self.shape(name), self._by_name[name].dtype)
                for name in self.options.gradients
            )
        b, t, n = self.batch, self.seq_len_q, self.num_heads
        by_name = {
            "out": jax.ShapeDtypeStruct((b, t, n, self.head_dim_v), self.dtype),
            "lse": jax.ShapeDtypeStruct((b, n, t), self.lse_dtype),
            "row_max": jax.ShapeDtypeStruct((b, n, t), self.lse_dtype),
            "keep": jax.ShapeDtypeStruct((b, n, t, self.seq_len_kv), jnp.bool_),
        }
        return tuple(by_name[name] for name in self.result_names)

    def __str__(self) -> str:
        direction = "backward" if self.is_backward else "forward"
        arrays = [f"{o.name} {o.dtype}{list(self._said_shape(o))}" for o in self.operands]
        return f"{direction}({', '.join([*arrays, *self._features()])})"

    @staticmethod
    def _said_shape(operand: Operand) -> tuple[int | Any, ...]:
        """Pages are of one pool, but for calls under `jax.vmap`: as the caller gave them."""
        is_one_pool = operand.name in ("key_pages", "value_pages") and operand.shape[0] == 1
        return operand.shape[1:] if is_one_pool else operand.shape

    def _features(self) -> list[str]:
        o = self.options
        features = [f"scale={o.scale:.6g}"]
        if o.is_causal:
            features.append(f"causal {o.causal_alignment}")
        if o.window != (None, None):
            features.append(f"window={o.window}")
        if o.logits_soft_cap is not None:
            features.append(f"logits_soft_cap={o.logits_soft_cap:g}")
        if o.max_segments is not None:
            features.append(f"max_segments={o.max_segments}")
        if o.max_seq_lens is not None:
            features.append(f"max_seq_lens={o.max_seq_lens}")
        if o.dropout_rate:
            features.append(f"dropout_rate={o.dropout_rate:g}")
        if o.deterministic_backward:
            features.append("deterministic_backward")
        orders = {"queries": o.heads_first_q, "keys": o.heads_first_kv}
        if any(orders.values()):
            features.append(f"heads first in {' and '.join(x for x, y in orders.items() if y)}")
        features += [f"{name} {program}" for name, program in o.mods.items()]
        if o.needs_max:
            features.append("row maximum")
        if o.needs_keep:
            features.append("dropout keep mask")
        if o.derivative:
            features.append(o.derivative)
        if o.value_page:
            features.append("keys and values in one pool")
        if o.gradients:
            features.append(f"gradients of {'/'.join(o.gradients)}")
        return features
