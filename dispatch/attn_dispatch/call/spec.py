"""The spec of one attention call: its options, and the shapes and dtypes of its arrays.

operands.py lists the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from attn_dispatch.call.operands import ArrayType, Operand, listed
from attn_dispatch.call.options import (
    AttentionOptions,
    Meaning,
    Promises,
    Wanted,
    backward_options,
    both_options,
    options_text,
)


@dataclass(frozen=True)
class AttentionSpec:
    """Every static fact of one forward or backward attention call; hashable.

    `of` makes it for a shard, a vmapped call and the caller's arrays alike, so that all derive
    their facts in the same way.
    """

    options: AttentionOptions
    operands: tuple[Operand, ...]

    @staticmethod
    def of(avals: Sequence[ArrayType], options: AttentionOptions) -> AttentionSpec:
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

    @cached_property
    def meaning(self) -> Meaning:
        """What the caller means."""
        return self.options.meaning

    @cached_property
    def wanted(self) -> Wanted:
        """Which results are wanted."""
        return self.options.wanted

    @cached_property
    def promises(self) -> Promises:
        """What the rewrite that asks for this call guarantees."""
        return self.options.promises

    def returning(self, wanted: Wanted) -> AttentionSpec:
        """The same call with these results."""
        return AttentionSpec(self.options.returning(wanted), self.operands)

    @property
    def without_settings(self) -> AttentionSpec:
        """The same call where its settings are in force."""
        return AttentionSpec(self.options.without_settings, self.operands)

    def by(self, *implementation: str) -> AttentionSpec:
        """The same call with these implementations as the only choices, in this order."""
        meaning = replace(self.meaning, implementation=implementation)
        return AttentionSpec(replace(self.options, meaning=meaning), self.operands)

    @cached_property
    def partner(self) -> AttentionSpec | None:
        """The call of the other direction that the same implementation must compute; else None."""
        options = self.wanted.partner
        if options is None:
            return None
        if self.is_backward:
            return AttentionSpec(options, self.operands[: len(options.operands)])
        return self.backward(options)

    def backward(self, options: AttentionOptions) -> AttentionSpec:
        """The backward call with these options that belongs to this forward call."""
        residuals = options.operands[len(self.operands) :]
        return AttentionSpec(options, self.operands + tuple(map(self.made, residuals)))

    def expected_backward(self) -> AttentionSpec | None:
        """The backward call of a forward call that will be differentiated, with no gradient of lse;
        None if it will not."""
        wanted = self.wanted
        if self.is_backward or wanted.derivative is not None or not wanted.differentiated:
            return None
        return self.backward(
            wanted.partner
            or backward_options(self.options, wanted.differentiated, has_lse_grad=False)
        )

    def in_training(
        self, wanted: tuple[str, ...], *, has_lse_grad: bool = False
    ) -> tuple[AttentionSpec, AttentionSpec]:
        """The forward call, returning lse, and the backward call when these operands are
        differentiated."""
        forward, backward = both_options(self.options, wanted, has_lse_grad=has_lse_grad)
        return AttentionSpec(forward, self.operands), self.backward(backward)

    @cached_property
    def _by_name(self) -> dict[str, Operand]:
        return {operand.name: operand for operand in self.operands}

    def has(self, name: str) -> bool:
        """Whether the call has this operand."""
        return name in self._by_name

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an operand of the call."""
        return self._by_name[name].shape

    def dtype_of(self, name: str) -> str:
        """The name of the dtype of an operand of the call."""
        return self._by_name[name].dtype

    @cached_property
    def is_backward(self) -> bool:
        return bool(self.wanted.gradients)

    @cached_property
    def dtype(self) -> str:
        """The name of the dtype of query, key, value and the output."""
        return self._by_name["query"].dtype

    @cached_property
    def lse_dtype(self) -> str:
        """float32, or float64 for float64 inputs, whose gradients would otherwise lose digits."""
        return "float64" if self.dtype == "float64" else "float32"

    @cached_property
    def batch(self) -> int:
        return self.shape("query")[0]

    @cached_property
    def seq_len_q(self) -> int:
        return self.shape("query")[1]

    @cached_property
    def num_heads(self) -> int:
        return self.shape("query")[2]

    @cached_property
    def head_dim(self) -> int:
        return self.shape("query")[3]

    @cached_property
    def is_paged(self) -> bool:
        """Whether keys and values lie in pages."""
        return self.has("page_table")

    @cached_property
    def page_size(self) -> int:
        """The number of keys in a page of a paged call."""
        return self.shape("key_pages")[2]

    @cached_property
    def seq_len_kv(self) -> int:
        if self.is_paged:
            return self.shape("page_table")[1] * self.page_size
        return self.shape("key")[1]

    @cached_property
    def num_kv_heads(self) -> int:
        return self.shape("key_pages" if self.is_paged else "key")[-2]

    @cached_property
    def head_dim_v(self) -> int:
        return self.shape("value_pages" if self.is_paged else "value")[-1]

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the axes of scores, by their letters (operands.py)."""
        return {
            "b": self.batch,
            "t": self.seq_len_q,
            "s": self.seq_len_kv,
            "n": self.num_heads,
            "k": self.num_kv_heads,
            "h": self.head_dim,
            "v": self.head_dim_v,
        }

    def made(self, name: str, sizes: Mapping[str, int] | None = None) -> Operand:
        """An operand or result as the table of operands has it, shared along no axis.

        `sizes` replaces those of the call, by the letters of axes.
        """
        known, all_sizes = listed(name), {**self.sizes, **(sizes or {})}
        dtype = {"call": self.dtype, "lse": self.lse_dtype}.get(known.dtype, known.dtype)
        return Operand(name, tuple(all_sizes[x] for x in known.axes), dtype)

    @cached_property
    def band(self) -> tuple[int | None, int | None]:
        """The keys seen to the left and right of the diagonal, causality included; None is open.

        A side that hides nothing counts as open: one as wide as `widest_side`, or, with a static
        offset, one that reaches the last key that any query could see. So the numbers cannot
        overflow int32.
        """
        left, right = self.meaning.window
        if self.meaning.is_causal:
            right = 0
        if self.has_symbolic_length:
            # Whether it hides anything is not known; no length is near 2^30.
            left, right = (None if side is None else min(side, 2**30 - 1) for side in (left, right))
            return left, right
        from_left = from_right = self.widest_side
        if self.meaning.causal_alignment == "by_offset" and not self.has("causal_offset"):
            offset = self.meaning.causal_offset
            from_left, from_right = self.seq_len_q - 1 + offset, self.seq_len_kv - 1 - offset
        return (
            None if left is None or left >= from_left else left,
            None if right is None or right >= from_right else right,
        )

    @cached_property
    def widest_side(self) -> int:
        """A side of a window as wide as this hides nothing.

        Offsets are from -2^29 to 2^29, and no length is near 2^29. So a position, an offset and a
        narrower side add up in int32.
        """
        if self.meaning.causal_alignment == "by_offset":
            return 2**30 - 1
        return self.seq_len_q + self.seq_len_kv

    @cached_property
    def has_diagonal(self) -> bool:
        """Whether causality, a window or ALiBi counts from the diagonal."""
        return self.band != (None, None) or self.has("window") or self.has("alibi_slopes")

    @cached_property
    def has_lengths(self) -> bool:
        """Whether batch rows have lengths, of queries or of keys."""
        return self.has("query_seq_lengths") or self.has("key_value_seq_lengths")

    @cached_property
    def is_packed(self) -> bool:
        """Whether a batch row may hold several sequences."""
        return self.has("query_segment_ids") or self.has("cu_seqlens_q")

    @cached_property
    def most_sequences(self) -> int | None:
        """The most sequences that a batch row of a packed call can have; None if unknown."""
        if self.has("cu_seqlens_q"):
            return self.shape("cu_seqlens_q")[1] - 1
        return self.meaning.max_segments

    @cached_property
    def has_runtime_lengths(self) -> bool:
        """Whether the lengths of sequences are known at run time only."""
        return self.has_lengths or self.is_packed

    @cached_property
    def longest_sequences(self) -> tuple[int, int]:
        """The most queries and the most keys that a sequence may have; no more than there are."""
        queries, keys = self.meaning.max_seq_lens or (self.seq_len_q, self.seq_len_kv)
        return min(queries, self.seq_len_q), min(keys, self.seq_len_kv)

    @cached_property
    def has_finite_padding(self) -> bool:
        """Whether padding rows of query, key, value and out_grad are known to be finite."""
        return self.meaning.finite_padding or self.promises.cleared_padding

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The dims that are symbols of `jax.export`, whose numbers are not known."""
        dims = (dim for operand in self.operands for dim in operand.shape)
        return tuple(dict.fromkeys(str(dim) for dim in dims if not isinstance(dim, int)))

    @cached_property
    def has_symbolic_length(self) -> bool:
        """Whether T or S is a symbol of `jax.export`."""
        return not (isinstance(self.seq_len_q, int) and isinstance(self.seq_len_kv, int))

    @cached_property
    def is_empty(self) -> bool:
        """Whether there are no scores. With a head dim of zero there are scores, all 0."""
        keys = self.shape("key_pages")[:4] if self.is_paged else self.shape("key")[:3]
        return 0 in self.shape("query")[:3] + keys + (self.seq_len_kv,)

    @cached_property
    def result_names(self) -> tuple[str, ...]:
        """Forward: "out" and the other wanted results; backward: `wanted.gradients`."""
        wanted = self.wanted
        if self.is_backward:
            return wanted.gradients
        extra = {"lse": wanted.needs_lse, "row_max": wanted.needs_max, "keep": wanted.needs_keep}
        return ("out", *(name for name, is_wanted in extra.items() if is_wanted))

    @cached_property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes and dtypes of the results, in the order of `result_names`."""
        known = self._by_name if self.is_backward else {x: self.made(x) for x in self.result_names}
        results = (known[name] for name in self.result_names)
        return tuple(jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in results)

    def __repr__(self) -> str:
        return f"<AttentionSpec {self}>"

    def __str__(self) -> str:
        direction = "backward" if self.is_backward else "forward"
        parts = [*map(str, self.operands), *options_text(self.meaning, self.wanted)]
        return f"{direction}({', '.join(parts)})"
