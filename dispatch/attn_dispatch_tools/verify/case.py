"""One attention call of the conformance suite: its options, and arrays drawn from its name."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.operands import mod_operands
from attn_dispatch.call.options import (
    DIFFERENTIABLE,
    AttentionOptions,
    CausalAlignment,
    Meaning,
    Wanted,
    backward_options,
)
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.program import ModProgram
from attn_dispatch_tools.verify import drawn_masks, drawn_mods
from attn_dispatch_tools.verify.drawn_mods import Step
from attn_dispatch_tools.verify.reference import Operands

Rows = tuple[tuple[int, ...], ...]
Shape = tuple[int, ...]
Transform = Literal["jit", "eager", "checkpoint", "vmap", "scan", "donate"]


@dataclass(frozen=True)
class Case:
    """One attention call; shapes have the letters of `attn_dispatch.call.spec`."""

    name: str
    """The family, a slash, and what distinguishes the case. The arrays are drawn from the name."""
    b: int = 2
    t: int = 10
    s: int = 14
    n: int = 4
    k: int = 2
    h: int = 8
    v: int = 8
    dtype: str = "float32"
    is_causal: bool = False
    alignment: CausalAlignment = "top_left"
    offset: int | None = None
    """The number that causal_alignment is instead."""
    offsets: tuple[int, ...] | None = None
    """The numbers as an array [1|B]."""
    window: tuple[int | None, int | None] = (None, None)
    window_arrays: Rows | None = None
    """The window as an array [1|B, 2]."""
    soft_cap: float | None = None
    score_mod: tuple[Step, ...] = ()
    """The steps of the score_mod; empty if there is none."""
    mask_mod: tuple[str, int] | None = None
    """A formula of `drawn_masks.FORMULAS`, and its number w."""
    own_arrays: bool = False
    """Whether each part of a mapped call has different arrays for its mods."""
    mods_start: tuple[int, int] = (0, 0)
    """The batch index and the head index at which a mod's b and n begin."""
    dropout: float = 0.0
    dropout_keys: int = 1
    dropout_impl: str = "threefry2x32"
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    q_segments: Rows | None = None
    kv_segments: Rows | None = None
    max_segments: int | None = None
    cu_q: Rows | None = None
    cu_kv: Rows | None = None
    longest: tuple[int, int] | None = None
    """The longest packed sequences of queries and of keys."""
    mask: Shape | None = None
    mask_kind: str = ""
    """A kind of `drawn_masks.DENSE`."""
    dead_rows: bool = False
    """Whether the mask makes some rows padding: it hides every key from them."""
    bias: Shape | None = None
    bias_dtype: str = "float32"
    infinite_bias: bool = False
    """Whether some biases are -inf, those of a whole row included."""
    alibi: int | None = None
    """The length of the batch axis of the slopes."""
    sinks: int | None = None
    """The length of the batch axis of the sinks."""
    lse_grad: bool = False
    needs_max: bool = False
    inference: bool = False
    """Whether only the forward pass is computed, without lse."""
    wanted: tuple[str, ...] = ()
    """The operands whose gradients are wanted; empty: all that have one."""
    mixed_poison: bool = False
    """Whether padding holds infinities and large numbers beside NaN."""
    deterministic: bool = False
    transform: Transform = "jit"
    """The transform of the call; vmap and scan map over `mapped` equal parts of the batch."""
    mapped: int = 2
    scale: float = 0.3
    magnitude: float = 1.0
    """The standard deviation of query and key."""
    score_shift: float = 0.0
    """A number added to every score, by constant columns in query and key, and to every sink."""
    rounded_bias: bool = False
    """Whether biases are rounded to the call's dtype, whatever their dtype."""
    page: int = 0
    """The number of keys in a page, which divides s; 0: key and value are not in pages."""
    shared_pages: int = 0
    """The number of first pages that all batch rows share."""
    heads_first: str = ""
    """The sides whose arrays or pages have heads first in memory: "", "q", "kv" or "q kv"."""
    one_pool: bool = False
    """Whether keys and values are in one pool, the page of its values after each page of keys."""
    ragged: bool = False
    """Whether the queries are packed, and the call is `paged_attention` with cu_seqlens_q."""
    rewrite: str = ""
    """The name of a rewrite (core/rewrites) to apply first, although nothing requires it."""

    def __str__(self) -> str:
        return self.name

    @property
    def family(self) -> str:
        """The part of the name before the slash."""
        return self.name.split("/")[0] if "/" in self.name else "others"

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as `from_json` reads them."""
        facts = {x.name: getattr(self, x.name) for x in fields(self)}
        facts = {x.name: facts[x.name] for x in fields(self) if facts[x.name] != x.default}
        return facts | {name: _runs(facts[name]) for name in _SEGMENTS & facts.keys()}

    @staticmethod
    def from_json(facts: dict[str, Any]) -> Case:
        """The case with these fields, as JSON has them: lists for tuples."""
        rows: dict[str, Any] = {name: _rows(facts[name]) for name in _SEGMENTS & facts.keys()}
        fields_ = {name: _tuples(x) for name, x in facts.items()} | rows
        if "score_mod" in facts:
            fields_["score_mod"] = tuple(Step(*step) for step in facts["score_mod"])
        return Case(**fields_)

    @property
    def operand_names(self) -> tuple[str, ...]:
        """The names of `operands`, in their order."""
        given = {
            "bias": self.bias,
            "mask": self.mask,
            **self._integers(),
            "alibi_slopes": self.alibi,
            "sinks": self.sinks,
            "dropout_key": self.dropout or None,
        }
        names = ("query", "key", "value", *(x for x, y in given.items() if y is not None))
        return names + self._read_by_score_mod + self._read_by_mask_mod + self._start

    @property
    def _read_by_score_mod(self) -> tuple[str, ...]:
        return mod_operands("score_mod", len(drawn_mods.reads_of(self.score_mod)))

    @property
    def _read_by_mask_mod(self) -> tuple[str, ...]:
        return mod_operands("mask_mod", drawn_masks.count_of(self.mask_mod))

    @property
    def _start(self) -> tuple[str, ...]:
        return ("mods_start",) if self.score_mod or self.mask_mod is not None else ()

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The operands of this case that have gradients."""
        read = self._read_by_score_mod
        return (*(name for name in DIFFERENTIABLE if name in self.operand_names), *read)

    @property
    def gradients(self) -> tuple[str, ...]:
        """The operands whose gradients are wanted."""
        return () if self.inference else self.wanted or self.differentiable

    @property
    def poison(self) -> tuple[float, ...]:
        """The numbers that padding holds, repeated."""
        return (np.nan, np.inf, -np.inf, 6e4) if self.mixed_poison else (np.nan,)

    def avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of `operands`, in their order."""
        b, s, k = self.b, self.s, self.k
        shapes: dict[str, tuple[Shape, Any]] = {
            "query": ((b, self.t, self.n, self.h), self.dtype),
            "key": ((b, s, k, self.h), self.dtype),
            "value": ((b, s, k, self.v), self.dtype),
        }
        if self.bias is not None:
            shapes["bias"] = self.bias, self.bias_dtype
        if self.mask is not None:
            shapes["mask"] = self.mask, bool
        for name, x in self._integers().items():
            shapes[name] = (len(x), *[len(y) for y in x[:1] if isinstance(y, tuple)]), np.int32
        for name, rows in (("alibi_slopes", self.alibi), ("sinks", self.sinks)):
            if rows is not None:
                shapes[name] = (rows, self.n), np.float32
        if self.dropout:
            keys = jax.eval_shape(self._dropout_keys)
            shapes["dropout_key"] = keys.shape, keys.dtype
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
            for name, (shape, dtype) in (shapes | self._mod_shapes()).items()
        }

    def operands(self) -> Operands:
        """The arrays of the forward call."""
        # NumPy promises only for this old generator that it always draws the same numbers.
        rng = np.random.RandomState(zlib.crc32(self.name.encode()))
        avals = self.avals()

        def normal(name: str) -> np.ndarray:
            return rng.standard_normal(avals[name].shape)

        operands = self._query_key_value(normal)
        if self.bias is not None:
            operands["bias"] = self._bias(normal("bias").astype(avals["bias"].dtype), rng)
        if self.mask is not None:
            mask = drawn_masks.dense_mask(self.mask_kind, rng, self.mask)
            if self.dead_rows:
                mask[..., ::3, :] = False
            operands["mask"] = mask
        operands |= {name: np.array(x) for name, x in self._integers().items()}
        if self.alibi is not None:
            operands["alibi_slopes"] = np.abs(normal("alibi_slopes").astype(np.float32)) / 2
        if self.sinks is not None:
            # Sinks are about as large as the scores, so that neither hides the other.
            operands["sinks"] = normal("sinks").astype(np.float32) + self.score_shift
        if self.dropout:
            operands["dropout_key"] = np.array(self._dropout_keys())
        if self._start:
            operands |= {name: normal(name) for name in self._read_by_score_mod}
            operands |= self._read_masks(rng, avals)
            operands["mods_start"] = np.array([self.mods_start] * self._copies)
        return {name: x.astype(avals[name].dtype) for name, x in operands.items()}

    def _read_masks(
        self, rng: np.random.RandomState, avals: dict[str, jax.ShapeDtypeStruct]
    ) -> dict[str, np.ndarray]:
        return {
            name: drawn_masks.drawn_array(self.mask_mod[0], i, rng, avals[name].shape, self.s)
            for i, name in enumerate(self._read_by_mask_mod)
            if self.mask_mod is not None
        }

    def _query_key_value(self, normal: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
        q, k = self.magnitude * normal("query"), self.magnitude * normal("key")
        if self.score_shift:
            # Half of the columns of query and key are constants, so that all scores shift by the
            # same amount. Query's constant is the larger one, because a fused backward pass
            # computes delta from the rounded output. Multiplied by key's constant, the rounding
            # error stays in every row of query's gradient; multiplied by query's constant, it
            # mostly cancels in key's gradient.
            columns = max(1, self.h // 2)
            root = np.sqrt(abs(self.score_shift / self.scale) / columns)
            q[..., :columns] = 3 * root
            k[..., :columns] = np.copysign(root / 3, self.score_shift * self.scale)
        operands = {"query": q, "key": k, "value": normal("value")}
        for name in ("key", "value"):
            shared = self.shared_pages * self.page
            operands[name][1:, :shared] = operands[name][:1, :shared]
        return operands

    def _bias(self, bias: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        """The bias, with some -inf or rounded, as the case wants."""
        if self.infinite_bias:
            bias[rng.random(self.bias) < 0.2] = -np.inf
            bias[..., 1, :] = -np.inf
        return bias.astype(jnp.dtype(self.dtype)) if self.rounded_bias else bias

    def _integers(self) -> dict[str, Any]:
        integers = {
            "query_seq_lengths": self.q_lengths,
            "key_value_seq_lengths": self.kv_lengths,
            "query_segment_ids": self.q_segments,
            "key_value_segment_ids": self.kv_segments,
            "cu_seqlens_q": self.cu_q,
            "cu_seqlens_kv": self.cu_kv,
            "window": self.window_arrays,
            "causal_offset": self.offsets,
        }
        return {name: x for name, x in integers.items() if x is not None}

    @property
    def has_offset(self) -> bool:
        """Whether causal_alignment is a number."""
        return self.offset is not None or self.offsets is not None

    @property
    def _has_same_lengths(self) -> bool:
        """Whether queries and keys have equal lengths, ids or cu_seqlens."""
        sides = (self.q_lengths, self.q_segments, self.cu_q), (
            self.kv_lengths, self.kv_segments, self.cu_kv,
        )  # fmt: skip
        return self.t == self.s and sides[0] == sides[1] != (None, None, None)

    def _dropout_keys(self) -> jax.Array:
        keys = jax.random.split(jax.random.key(7, impl=self.dropout_impl), self.dropout_keys)
        return jax.random.key_data(keys)

    @property
    def _copies(self) -> int:
        """The number of mapped calls. In each, a mod's b counts its part of the batch from 0."""
        return self.mapped if self.transform in ("vmap", "scan") else 1

    @property
    def _read_lengths(self) -> dict[str, int]:
        """By index (b, n, t or s), the length of the arrays that mods read at it."""
        b, n = self.mods_start
        sequences = self.b // self._copies if self.cu_q is None else len(self.cu_q[0]) - 1
        return {"b": b + sequences, "n": n + self.n, "t": self.t, "s": self.s}

    @property
    def _mask_shapes(self) -> tuple[tuple[Shape, type], ...]:
        if self.mask_mod is None:
            return ()
        return drawn_masks.array_shapes(self.mask_mod[0], self._read_lengths)

    def _mod_shapes(self) -> dict[str, tuple[Shape, Any]]:
        if not self._start:
            return {}
        lengths, rows = self._read_lengths, self._copies if self.own_arrays else 1
        reads = drawn_mods.reads_of(self.score_mod)
        made: dict[str, tuple[Shape, Any]] = {
            name: ((rows, lengths[index]), np.float32)
            for name, index in zip(self._read_by_score_mod, reads, strict=True)
        }
        for name, (shape, dtype) in zip(self._read_by_mask_mod, self._mask_shapes, strict=True):
            made[name] = (rows, *shape), dtype
        return made | {"mods_start": ((self._copies, 2), np.int32)}

    def _programs(self) -> dict[str, ModProgram]:
        lengths, programs = self._read_lengths, {}
        if self.score_mod:
            array_lengths = tuple(lengths[x] for x in drawn_mods.reads_of(self.score_mod))
            dtype = lse_dtype(self.dtype)
            programs["score_mod"] = drawn_mods.score_mod(self.score_mod, array_lengths, dtype)
        if self.mask_mod is not None:
            programs["mask_mod"] = drawn_masks.mask_mod(*self.mask_mod, self._mask_shapes)
        return programs

    def cotangents(self) -> Operands:
        """out_grad and, if the case has one, lse_grad; random numbers."""
        rng = np.random.RandomState(zlib.crc32(b"cotangents of " + self.name.encode()))
        shape = (self.b, self.t, self.n, self.v)
        cotangents = {"out_grad": rng.standard_normal(shape).astype(jnp.dtype(self.dtype))}
        if self.lse_grad:
            lse_grad = rng.standard_normal((self.b, self.n, self.t))
            cotangents["lse_grad"] = lse_grad.astype(lse_dtype(self.dtype))
        return cotangents

    def forward_options(
        self,
        *,
        needs_lse: bool = True,
        needs_keep: bool = False,
        implementation: tuple[str, ...] = (),
    ) -> AttentionOptions:
        """The options of the forward call."""
        programs = self._programs()
        return AttentionOptions(
            operands=self.operand_names,
            meaning=Meaning(
                scale=self.scale,
                is_causal=self.is_causal,
                causal_alignment="by_offset" if self.has_offset else self.alignment,
                causal_offset=self.offset or 0,
                window=self.window,
                logits_soft_cap=self.soft_cap,
                max_segments=self.max_segments,
                max_seq_lens=self.longest,
                same_lengths=self._has_same_lengths,
                dropout_rate=self.dropout,
                deterministic_backward=self.deterministic,
                dropout_impl=self.dropout_impl if self.dropout else None,
                score_mod=programs.get("score_mod"),
                mask_mod=programs.get("mask_mod"),
                heads_first_q="q" in self.heads_first.split(),
                heads_first_kv="kv" in self.heads_first.split(),
                implementation=implementation,
            ),
            wanted=Wanted(
                needs_lse=needs_lse,
                needs_max=self.needs_max and needs_lse,
                needs_keep=needs_keep,
            ),
        )

    def backward_options(self, gradients: tuple[str, ...] | None = None) -> AttentionOptions:
        """The options of the backward call, for these gradients; by default all of them."""
        return backward_options(
            self.forward_options(),
            self.differentiable if gradients is None else gradients,
            has_lse_grad=self.lse_grad,
        )


def _tuples(x: Any) -> Any:
    return tuple(_tuples(y) for y in x) if isinstance(x, list) else x


_SEGMENTS = {"q_segments", "kv_segments"}


def _runs(rows: Rows) -> list[list[list[int]]]:
    """Rows of ids as runs of [id, count]."""
    return [[[x, len(list(run))] for x, run in groupby(row)] for row in rows]


def _rows(runs: list[list[list[int]]]) -> Rows:
    return tuple(tuple(x for x, count in row for _ in range(count)) for row in runs)


def lse_dtype(dtype: str) -> str:
    """The dtype of lse in a call of this dtype."""
    return "float64" if dtype == "float64" else "float32"


def spec_of(options: AttentionOptions, operands: dict[str, Any]) -> AttentionSpec:
    """The spec of a call with these arrays, or abstract values."""
    return AttentionSpec.of([operands[name] for name in options.operands], options)
