"""Attention written out in float64 NumPy: what every implementation is tested against.

Nothing is shared with the library but `AttentionOptions`, and nothing is clever: one batch row at
a time, every pair of query and key explicit, positions counted by comparing ids pair by pair,
softmax with its full Jacobian-vector product. Operands and shapes are those of
`attn_dispatch.spec`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_dispatch.spec import AttentionOptions

Operands = dict[str, np.ndarray]


def reference(
    options: AttentionOptions, operands: Operands, keep: np.ndarray | None = None
) -> Operands:
    """out [B, T, N, V] and lse [B, N, T]; with out_grad among the operands all gradients as well.

    `keep` [B, N, T, S] is the dropout mask, True = kept; `dropout_key` is not looked at.
    """
    query, value = operands["query"], operands["value"]
    b, t, n, _ = query.shape
    results = {"out": np.zeros((b, t, n, value.shape[3])), "lse": np.full((b, n, t), -np.inf)}
    names = ("query", "key", "value", "bias", "sinks", "alibi_slopes")
    gradients = {}
    if "out_grad" in operands:
        gradients = {x: np.zeros(operands[x].shape) for x in names if x in operands}
    for batch_row in range(b):
        for head in range(n):
            one = _OneHead(options, operands, keep, batch_row, head)
            results["out"][batch_row, :, head] = one.out
            results["lse"][batch_row, head] = one.lse
            if gradients:
                one.add_gradients(gradients)
    return results | gradients


def segment_ids(operands: Operands, batch_row: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the queries [T] and keys [S] of one batch row; 0 is padding."""
    found = []
    for side, array in (("query", "query"), ("key_value", "key")):
        length = operands[array].shape[1]
        ids = operands.get(f"{side}_segment_ids")
        ids = np.ones(length, int) if ids is None else np.array(ids[batch_row], int)
        cu_seqlens = operands.get("cu_seqlens_q" if side == "query" else "cu_seqlens_kv")
        if cu_seqlens is not None:
            ids[:] = 0
            starts = list(cu_seqlens[batch_row])
            for m in range(len(starts) - 1):
                ids[starts[m] : starts[m + 1]] = m + 1
        lengths = operands.get(f"{side}_seq_lengths")
        if lengths is not None:
            ids[max(int(lengths[batch_row]), 0) :] = 0
        found.append(np.maximum(ids, 0))
    return found[0], found[1]


def relative_positions(
    options: AttentionOptions, query_ids: np.ndarray, key_ids: np.ndarray
) -> np.ndarray:
    """j - (i + offset) for every pair [T, S]; meaningful where the ids are equal."""
    i = np.tril(query_ids[:, None] == query_ids, -1).sum(axis=1)
    j = np.tril(key_ids[:, None] == key_ids, -1).sum(axis=1)
    offset = np.zeros_like(i)
    if options.causal_alignment == "bottom_right":
        keys = (query_ids[:, None] == key_ids).sum(axis=1)
        queries = (query_ids[:, None] == query_ids).sum(axis=1)
        offset = keys - queries
    return j[None, :] - (i + offset)[:, None]


def allowed_pairs(
    options: AttentionOptions, operands: Operands, batch_row: int, head: int
) -> np.ndarray:
    """Whether query i may attend key j, bool [T, S], in one head of one batch row."""
    query_ids, key_ids = segment_ids(operands, batch_row)
    relative = relative_positions(options, query_ids, key_ids)
    may = (query_ids[:, None] == key_ids) & (query_ids[:, None] != 0)
    left, right = options.window
    may &= True if left is None else relative >= -left
    may &= True if right is None else relative <= right
    may &= True if not options.is_causal else relative <= 0
    if "mask" in operands:
        may &= _pick(operands["mask"], batch_row, head)
    return may


def allowed(options: AttentionOptions, operands: Operands) -> np.ndarray:
    """`allowed_pairs` of all heads, bool [B, N, T, S]."""
    b, _, n, _ = operands["query"].shape
    return np.array([[allowed_pairs(options, operands, x, h) for h in range(n)] for x in range(b)])


def poison_padding(operands: Operands, poison: float = np.nan) -> Operands:
    """The operands with `poison` in every place of theirs that only padding looks at."""
    poisoned = {name: np.array(x) for name, x in operands.items()}
    for batch_row in range(operands["query"].shape[0]):
        query_ids, key_ids = segment_ids(operands, batch_row)
        for name in {"query", "out", "out_grad"} & set(poisoned):
            poisoned[name][batch_row, query_ids == 0] = poison
        for name in {"key", "value"} & set(poisoned):
            poisoned[name][batch_row, key_ids == 0] = poison
        for name in {"lse", "lse_grad"} & set(poisoned):
            poisoned[name][batch_row][:, query_ids == 0] = poison
        bias = poisoned.get("bias")
        if bias is not None and bias.shape[0] > 1:
            if bias.shape[2] > 1:
                bias[batch_row][:, query_ids == 0] = poison
            if bias.shape[3] > 1:
                bias[batch_row][:, :, key_ids == 0] = poison
    return poisoned


def _pick(x: np.ndarray, batch_row: int, head: int) -> np.ndarray:
    """[1|B, 1|N, …] at one batch row and head."""
    return x[batch_row if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]


def _add(gradient: np.ndarray, batch_row: int, head: int, amount: Any) -> None:
    """Adds to [1|B, 1|N, 1|T, 1|S] or [1|B, N] what one head contributes, summed to fit."""
    target = _pick(gradient, batch_row, head)
    axes = tuple(i for i, n in enumerate(target.shape) if n == 1)
    where = (min(batch_row, gradient.shape[0] - 1), min(head, gradient.shape[1] - 1))
    gradient[where] += np.sum(amount, axis=axes, keepdims=True) if axes else amount


class _OneHead:
    """Forward of one query head of one batch row, and what its gradients need."""

    def __init__(
        self,
        options: AttentionOptions,
        operands: Operands,
        keep: np.ndarray | None,
        batch_row: int,
        head: int,
    ) -> None:
        self.options, self.operands, self.at = options, operands, (batch_row, head)
        self.kv_head = head // (operands["query"].shape[2] // operands["key"].shape[2])
        query_ids, key_ids = segment_ids(operands, batch_row)
        self.real_queries, self.real_keys = query_ids[:, None] != 0, key_ids[:, None] != 0
        self.q = self._clean("query", head, self.real_queries)
        self.k = self._clean("key", self.kv_head, self.real_keys)
        self.v = self._clean("value", self.kv_head, self.real_keys)

        score = options.scale * (self.q @ self.k.T)
        self.cap_slope = np.ones_like(score)
        if options.logits_soft_cap is not None:
            self.cap_slope = 1 / np.cosh(score / options.logits_soft_cap) ** 2
            score = options.logits_soft_cap * np.tanh(score / options.logits_soft_cap)
        if "bias" in operands:
            score = score + _pick(operands["bias"], *self.at).astype(np.float64)
        self.distance = np.abs(relative_positions(options, query_ids, key_ids))
        if "alibi_slopes" in operands:
            slope = float(_pick(operands["alibi_slopes"], *self.at))
            score = score - slope * self.distance
        score = np.where(allowed_pairs(options, operands, *self.at), score, -np.inf)

        self.lse = np.full(len(score), -np.inf)
        self.p = np.zeros_like(score)
        self.p_sink = np.zeros(len(score))
        for i, row in enumerate(score):
            if (row == -np.inf).all():
                continue
            sink = [float(_pick(operands["sinks"], *self.at))] if "sinks" in operands else []
            all_scores = np.array([*row, *sink])
            top = all_scores.max()
            self.lse[i] = top + np.log(np.exp(all_scores - top).sum())
            p = np.exp(all_scores - self.lse[i])
            self.p[i], self.p_sink[i] = p[: len(row)], p[len(row) :].sum()

        self.kept = np.ones_like(score)
        if keep is not None:
            self.kept = _pick(keep, *self.at) / (1 - options.dropout_rate)
        self.out = (self.p * self.kept) @ self.v

    def add_gradients(self, gradients: Operands) -> None:
        """Adds this head's part of every gradient, from out_grad and lse_grad."""
        batch_row, head = self.at
        out_grad = self._clean("out_grad", head, self.real_queries)
        p_grad = (out_grad @ self.v.T) * self.kept
        # Softmax over keys and sink; the sink's own p_grad is 0, since it has no value.
        mean = (self.p * p_grad).sum(axis=1)
        lse_grad = np.zeros_like(mean)
        if "lse_grad" in self.operands:
            live = np.isfinite(self.lse)
            lse_grad[live] = self.operands["lse_grad"][batch_row, head][live]
        score_grad = self.p * (p_grad - mean[:, None] + lse_grad[:, None])
        sink_grad = (self.p_sink * (lse_grad - mean)).sum()
        raw_grad = self.options.scale * score_grad * self.cap_slope
        gradients["query"][batch_row, :, head] += raw_grad @ self.k
        gradients["key"][batch_row, :, self.kv_head] += raw_grad.T @ self.q
        gradients["value"][batch_row, :, self.kv_head] += (self.p * self.kept).T @ out_grad
        if "bias" in gradients:
            _add(gradients["bias"], *self.at, score_grad)
        if "sinks" in gradients:
            _add(gradients["sinks"], *self.at, sink_grad)
        if "alibi_slopes" in gradients:
            _add(gradients["alibi_slopes"], *self.at, -(score_grad * self.distance).sum())

    def _clean(self, name: str, head: int, real: np.ndarray) -> np.ndarray:
        """One head of an operand [L, ·] in float64, with 0 in padding whatever stands there."""
        return np.where(real, self.operands[name][self.at[0], :, head].astype(np.float64), 0.0)
