"""Attention written out in float64 NumPy, against which every implementation is tested.

It shares only `AttentionOptions` with the library, and is simple: one batch row at a time, every
pair of query and key explicit, positions counted by comparing ids pair by pair, softmax with its
full Jacobian-vector product. Operands and shapes are those of `attn_dispatch.call.spec`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from attn_dispatch.call.operands import is_mod_operand, mod_operands
from attn_dispatch.call.options import DIFFERENTIABLE, AttentionOptions
from attn_dispatch_tools.verify.drawn_masks import DrawnMaskMod
from attn_dispatch_tools.verify.drawn_mods import DrawnScoreMod, Places

Operands = dict[str, np.ndarray]


def reference(
    options: AttentionOptions, operands: Operands, keep: np.ndarray | None = None
) -> Operands:
    """out [B, T, N, V] and lse [B, N, T], with needs_max row_max [B, N, T].

    With out_grad among the operands all gradients as well. `keep` [B, N, T, S] is the dropout
    mask, True = kept; `dropout_key` is ignored.
    """
    b = operands["query"].shape[0]
    rows = [_Row(options, operands, keep, batch_row) for batch_row in range(b)]
    results = {
        "out": np.array([row.out.swapaxes(0, 1) for row in rows]),
        "lse": np.array([row.lse for row in rows]),
    }
    if options.wanted.needs_max:
        results["row_max"] = np.array([row.row_max for row in rows])
    mark_invalid(options, operands, results)
    if "out_grad" in operands:
        wanted = (x for x in operands if x in DIFFERENTIABLE or x.startswith("score_mod_"))
        gradients = {x: np.zeros(operands[x].shape) for x in wanted}
        for row in rows:
            row.add_gradients(gradients)
        results |= gradients
    return results


def segment_ids(
    options: AttentionOptions, operands: Operands, batch_row: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the queries [T] and keys [S] of one batch row; 0 for padding and invalid rows."""
    (query, _), (key, _) = ids_and_invalid(options, operands, batch_row)
    return query, key


def invalid_queries(options: AttentionOptions, operands: Operands, batch_row: int) -> np.ndarray:
    """The queries whose results are NaN because integers of the call are invalid: bool [T]."""
    (_, invalid), _ = ids_and_invalid(options, operands, batch_row)
    return invalid


def ids_and_invalid(
    options: AttentionOptions, operands: Operands, batch_row: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For queries and for keys: ids, 0 where there is none, and which rows are invalid."""
    sides, is_invalid_row = [], False
    if "window" in operands:
        is_invalid_row = bool((_pick(operands["window"], batch_row) < 0).any())
    for i, (side, array) in enumerate((("query", "query"), ("key_value", "key"))):
        length = operands[array].shape[1]
        ids = operands.get(f"{side}_segment_ids")
        ids = np.ones(length, int) if ids is None else np.array(ids[batch_row], int)
        cu_seqlens = operands.get("cu_seqlens_q" if side == "query" else "cu_seqlens_kv")
        if cu_seqlens is not None:
            ids[:] = 0
            ends = [int(x) for x in cu_seqlens[batch_row]]
            is_invalid_row |= ends[0] != 0 or ends != sorted(ends) or ends[-1] > length
            for m in range(len(ends) - 1):
                ids[max(ends[m], 0) : max(ends[m + 1], 0)] = m + 1
        lengths = operands.get(f"{side}_seq_lengths")
        if lengths is not None:
            is_invalid_row |= not 0 <= lengths[batch_row] <= length
            ids[max(int(lengths[batch_row]), 0) :] = 0
        largest = options.meaning.max_segments
        invalid = ids < 0 if largest is None else (ids < 0) | (ids > largest)
        longest = None if options.meaning.max_seq_lens is None else options.meaning.max_seq_lens[i]
        sides.append((np.where(invalid, 0, ids), invalid, longest))
    is_ordered = options.meaning.max_segments is not None
    misplaced = {x for ids, _, most in sides for x in _misplaced(ids, most, is_ordered=is_ordered)}
    found = []
    for ids, invalid, _ in sides:
        invalid = invalid | np.isin(ids, list(misplaced)) | is_invalid_row
        found.append((np.where(invalid, 0, ids), invalid))
    return found


def _misplaced(ids: np.ndarray, longest: int | None, *, is_ordered: bool) -> set[int]:
    """The ids with too many rows, or whose rows are not in order although they must be."""
    found = set()
    for x in {*ids.tolist()} - {0}:
        places = np.flatnonzero(ids == x)
        is_run = len(places) == places[-1] - places[0] + 1
        is_after_larger = (ids[: places[-1]] > x).any()
        if is_ordered and (not is_run or is_after_larger):
            found.add(x)
        if longest is not None and len(places) > longest:
            found.add(x)
    return found


def mark_invalid(options: AttentionOptions, operands: Operands, results: Operands) -> None:
    """Put NaN into the rows of `invalid_queries` of out, lse and row_max."""
    for batch_row in range(operands["query"].shape[0]):
        invalid = invalid_queries(options, operands, batch_row)
        results["out"][batch_row, invalid] = np.nan
        for name in {"lse", "row_max"} & results.keys():
            results[name][batch_row][:, invalid] = np.nan


def relative_positions(
    options: AttentionOptions, query_ids: np.ndarray, key_ids: np.ndarray
) -> np.ndarray:
    """j - (i + offset) for every pair [T, S]; meaningful where the ids are equal."""
    i = np.tril(query_ids[:, None] == query_ids, -1).sum(axis=1)
    j = np.tril(key_ids[:, None] == key_ids, -1).sum(axis=1)
    offset = np.full_like(i, options.meaning.causal_offset)
    if options.meaning.causal_alignment == "bottom_right":
        keys = (query_ids[:, None] == key_ids).sum(axis=1)
        queries = (query_ids[:, None] == query_ids).sum(axis=1)
        offset = keys - queries
    return j[None, :] - (i + offset)[:, None]


def with_row_offset(
    options: AttentionOptions, operands: Operands, batch_row: int
) -> AttentionOptions:
    """The options with the offset of this batch row, if offsets are an array."""
    if "causal_offset" not in operands:
        return options
    offset = int(_pick(operands["causal_offset"], batch_row))
    return replace(options, meaning=replace(options.meaning, causal_offset=offset))


def allowed_pairs(options: AttentionOptions, operands: Operands, batch_row: int) -> np.ndarray:
    """Whether query i may attend key j, bool [N, T, S], in one batch row."""
    query_ids, key_ids = segment_ids(options, operands, batch_row)
    of_row = with_row_offset(options, operands, batch_row)
    relative = relative_positions(of_row, query_ids, key_ids)
    may = (query_ids[:, None] == key_ids) & (query_ids[:, None] != 0)
    left, right = options.meaning.window
    if "window" in operands:
        left, right = (int(x) for x in _pick(operands["window"], batch_row))
    may &= True if left is None else relative >= -left
    may &= True if right is None else relative <= right
    may &= True if not options.meaning.is_causal else relative <= 0
    heads = np.broadcast_to(may, (operands["query"].shape[2], *may.shape))
    if options.meaning.mask_mod is not None:
        assert isinstance(options.meaning.mask_mod, DrawnMaskMod)
        places = places_of(options, operands, batch_row)
        heads = heads & options.meaning.mask_mod.may_attend(places, arrays_of("mask_mod", operands))
    return heads & _pick(operands["mask"], batch_row) if "mask" in operands else heads


def allowed(options: AttentionOptions, operands: Operands) -> np.ndarray:
    """`allowed_pairs` of all batch rows, bool [B, N, T, S]."""
    b = operands["query"].shape[0]
    return np.array([allowed_pairs(options, operands, row) for row in range(b)])


def places_of(options: AttentionOptions, operands: Operands, batch_row: int) -> Places:
    """The arguments of score_mod and mask_mod for one batch row; together they are [N, T, S]."""
    query_ids, key_ids = segment_ids(options, operands, batch_row)
    start = operands["mods_start"]
    rows_of_one = operands["query"].shape[0] // len(start)
    copy = batch_row // rows_of_one
    b = np.array(start[copy, 0] + batch_row % rows_of_one)
    if "cu_seqlens_q" in operands:
        b = query_ids[None, :, None] - 1
    t, s = (np.tril(ids[:, None] == ids, -1).sum(axis=1) for ids in (query_ids, key_ids))
    n = start[copy, 1] + np.arange(operands["query"].shape[2])
    return Places(np.array(copy), b, n[:, None, None], t[:, None], s[None, :])


def arrays_of(mod: str, operands: Operands) -> list[np.ndarray]:
    """The arrays that a mod reads, each [1|C, length]."""
    count = sum(is_mod_operand(x) and x.startswith(mod) for x in operands)
    return [operands[name] for name in mod_operands(mod, count)]


def attended(options: AttentionOptions, operands: Operands) -> np.ndarray:
    """The `allowed` pairs without those that a bias of -inf hides, bool [B, N, T, S]."""
    may = allowed(options, operands)
    return may & (operands["bias"] != -np.inf) if "bias" in operands else may


def poison_padding(
    options: AttentionOptions, operands: Operands, poison: float | tuple[float, ...] = np.nan
) -> Operands:
    """The operands with the numbers of `poison`, repeated, wherever they are padding."""

    pattern = np.array(poison).reshape(-1)

    def spoil(x: np.ndarray, *where: Any) -> None:
        shape = x[where].shape
        x[where] = pattern[np.arange(math.prod(shape)) % len(pattern)].reshape(shape)

    poisoned = {name: np.array(x) for name, x in operands.items()}
    for batch_row in range(operands["query"].shape[0]):
        query_ids, key_ids = segment_ids(options, operands, batch_row)
        for name in {"query", "out", "out_grad"} & set(poisoned):
            spoil(poisoned[name], batch_row, query_ids == 0)
        for name in {"key", "value"} & set(poisoned):
            spoil(poisoned[name], batch_row, key_ids == 0)
        for name in {"lse", "lse_grad"} & set(poisoned):
            spoil(poisoned[name][batch_row], slice(None), query_ids == 0)
        bias = poisoned.get("bias")
        if bias is not None and bias.shape[0] > 1:
            if bias.shape[2] > 1:
                spoil(bias[batch_row], slice(None), query_ids == 0)
            if bias.shape[3] > 1:
                spoil(bias[batch_row], slice(None), slice(None), key_ids == 0)
    return poisoned


def _pick(x: np.ndarray, batch_row: int) -> np.ndarray:
    """[1|B, …] at one batch row."""
    return x[batch_row if x.shape[0] > 1 else 0]


def _add(gradient: np.ndarray, batch_row: int, amount: np.ndarray) -> None:
    """Add one batch row's part to [1|B, …], summed over the axes of length 1."""
    target = _pick(gradient, batch_row)
    axes = tuple(i for i, n in enumerate(target.shape) if n == 1)
    target += amount.sum(axis=axes, keepdims=True)


class _Row:
    """The forward pass of one batch row, for all heads, and the values that its gradients need.

    Arrays start with the axis of query heads, [N, T, ·] and [N, S, ·]; each query head has a copy
    of the kv head that it shares.
    """

    def __init__(
        self,
        options: AttentionOptions,
        operands: Operands,
        keep: np.ndarray | None,
        batch_row: int,
    ) -> None:
        self.options, self.operands, self.batch_row = options, operands, batch_row
        self.num_kv_heads = operands["key"].shape[2]
        self.groups = operands["query"].shape[2] // self.num_kv_heads
        query_ids, key_ids = segment_ids(options, operands, batch_row)
        self.real_queries = query_ids != 0
        self.q = self._clean("query", query_ids)
        self.k = self._clean("key", key_ids).repeat(self.groups, axis=0)
        self.v = self._clean("value", key_ids).repeat(self.groups, axis=0)

        score = options.meaning.scale * (self.q @ self.k.swapaxes(1, 2))
        self.slope = np.ones((1, 1, 1))
        if options.meaning.logits_soft_cap is not None:
            bent = np.tanh(score / options.meaning.logits_soft_cap)
            score, self.slope = options.meaning.logits_soft_cap * bent, 1 - bent**2
        self.by_read: dict[str, np.ndarray] = {}
        may_attend = allowed_pairs(options, operands, batch_row)
        if options.meaning.score_mod is not None:
            assert isinstance(options.meaning.score_mod, DrawnScoreMod)
            self.places = places_of(options, operands, batch_row)
            arrays = [x.astype(np.float64) for x in arrays_of("score_mod", operands)]
            score, slope, self.by_read = options.meaning.score_mod.modified(
                score, may_attend, self.places, arrays
            )
            self.slope = self.slope * slope
        if "bias" in operands:
            score = score + _pick(operands["bias"], batch_row).astype(np.float64)
        of_row = with_row_offset(options, operands, batch_row)
        self.distance = np.abs(relative_positions(of_row, query_ids, key_ids))
        if "alibi_slopes" in operands:
            slopes = _pick(operands["alibi_slopes"], batch_row).astype(np.float64)
            score = score - slopes[:, None, None] * self.distance
        score = np.where(may_attend, score, -np.inf)

        self.row_max = score.max(axis=2, initial=-np.inf)  # [N, T]
        self.attends = self.row_max != -np.inf
        sink = np.full((len(score), 1), -np.inf)
        if "sinks" in operands:
            sink = _pick(operands["sinks"], batch_row).astype(np.float64)[:, None]
        top = np.where(self.attends, np.maximum(self.row_max, sink), 0)
        total = np.exp(score - top[..., None]).sum(axis=2) + np.exp(sink - top)
        lse = top + np.log(np.where(self.attends, total, 1))
        self.lse = np.where(self.attends, lse, -np.inf)
        self.p = np.exp(score - lse[..., None])
        self.p_sink = np.where(self.attends, np.exp(sink - lse), 0)

        self.kept: np.ndarray | float = 1.0
        if keep is not None:
            self.kept = keep[batch_row] / (1 - options.meaning.dropout_rate)
        self.out = (self.p * self.kept) @ self.v

    def add_gradients(self, gradients: Operands) -> None:
        """Add this row's part of every gradient, from out_grad and lse_grad."""
        out_grad = self._clean("out_grad", self.real_queries)
        p_grad = (out_grad @ self.v.swapaxes(1, 2)) * self.kept
        # Softmax over keys and sink; the sink's own p_grad is 0, since it has no value.
        mean = (self.p * p_grad).sum(axis=2)
        lse_grad = np.zeros_like(mean)
        if "lse_grad" in self.operands:
            lse_grad = np.where(self.attends, self.operands["lse_grad"][self.batch_row], 0)
        score_grad = self.p * (p_grad - mean[..., None] + lse_grad[..., None])
        sink_grad = (self.p_sink * (lse_grad - mean)).sum(axis=1)
        raw_grad = self.options.meaning.scale * score_grad * self.slope
        gradients["query"][self.batch_row] += (raw_grad @ self.k).swapaxes(0, 1)
        gradients["key"][self.batch_row] += self._sum_groups(raw_grad.swapaxes(1, 2) @ self.q)
        p_kept = (self.p * self.kept).swapaxes(1, 2)
        gradients["value"][self.batch_row] += self._sum_groups(p_kept @ out_grad)
        if "bias" in gradients:
            _add(gradients["bias"], self.batch_row, score_grad)
        if "sinks" in gradients:
            _add(gradients["sinks"], self.batch_row, sink_grad)
        if "alibi_slopes" in gradients:
            slope_grad = -(score_grad * self.distance).sum(axis=(1, 2))
            _add(gradients["alibi_slopes"], self.batch_row, slope_grad)
        for name, (index, slope) in zip(
            mod_operands("score_mod", len(self.by_read)), self.by_read.items(), strict=True
        ):
            shape = gradients[name].shape
            gradients[name] += self.places.summed(index, score_grad * slope, shape)

    def _clean(self, name: str, ids: np.ndarray) -> np.ndarray:
        """An operand [·, L, ·] in float64, with 0 in padding rows whatever they hold."""
        x = self.operands[name][self.batch_row].astype(np.float64).swapaxes(0, 1)
        return np.where(ids[:, None] != 0, x, 0.0)

    def _sum_groups(self, x: np.ndarray) -> np.ndarray:
        """[N, S, ·] to [S, K, ·]: the gradient of a kv head is summed over its query heads."""
        return x.reshape(self.num_kv_heads, self.groups, *x.shape[1:]).sum(axis=1).swapaxes(0, 1)
