"""Attention in a few lines of jax.numpy, as an implementation for attn_dispatch."""

import jax
import jax.numpy as jnp

from attn_dispatch.implementation import Plan

NAME, PLATFORM = "toy", "cpu"
FEATURES = ("causality and windows",)  # calls with other features are refused for you


def not_supported_reasons(spec, device):
    """Every reason against the call besides those that follow from FEATURES."""
    reasons = []
    if spec.seq_len_kv > 4096:
        reasons.append(f"toy takes up to 4096 keys, got {spec.seq_len_kv}")
    if spec.dtype == "float64":
        reasons.append("toy computes in float32, got float64")
    return reasons


def plan(spec, device):
    scores = spec.batch * spec.num_heads * spec.seq_len_q * spec.seq_len_kv
    return Plan(engine="one matrix of scores", workspace_bytes=4 * scores)


def forward(spec, device, operands):
    """out [B, T, N, V], and lse [B, N, T] where `spec.wanted.needs_lse`."""
    scores = _scores(spec, operands)
    lse = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", _weights(scores, lse), _wide(spec, operands["value"]))
    out = out.astype(spec.dtype)
    return (out, lse) if spec.wanted.needs_lse else (out,)


def backward(spec, device, operands):
    """The gradients that `spec.wanted.gradients` names, in its order."""
    q, k, v, out, out_grad = (
        _wide(spec, operands[x]) for x in ("query", "key", "value", "out", "out_grad")
    )
    p = _weights(_scores(spec, operands), operands["lse"])
    dp = jnp.einsum("btnh,bsnh->bnts", out_grad, v)
    ds = p * (dp - (out * out_grad).sum(-1).swapaxes(1, 2)[..., None]) * spec.meaning.scale
    found = {
        "query": jnp.einsum("bnts,bsnh->btnh", ds, k),
        "key": jnp.einsum("bnts,btnh->bsnh", ds, q),
        "value": jnp.einsum("bnts,btnh->bsnh", p, out_grad),
    }
    gradients = []
    for name in spec.wanted.gradients:
        shape = spec.shape(name)  # of key and value [B, S, K, H]: sum the heads of each group
        grouped = found[name].reshape(*shape[:3], -1, shape[3])
        gradients.append(grouped.sum(3).astype(spec.dtype))
    return tuple(gradients)


def _wide(spec, x):
    """x in float32, with kv heads repeated for each query head."""
    return jnp.repeat(x.astype(jnp.float32), spec.num_heads // x.shape[2], axis=2)


def _scores(spec, operands):
    """The scores [B, N, T, S], -inf where a query may not attend."""
    q, k = _wide(spec, operands["query"]), _wide(spec, operands["key"])
    scores = spec.meaning.scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    offset = spec.seq_len_kv - spec.seq_len_q
    diagonal = jnp.arange(spec.seq_len_q)[:, None]
    diagonal += offset if spec.meaning.causal_alignment == "bottom_right" else 0
    left, right = spec.band  # keys seen to both sides of the diagonal; None is open
    behind = diagonal - jnp.arange(spec.seq_len_kv)
    if left is not None:
        scores = jnp.where(behind <= left, scores, -jnp.inf)
    if right is not None:
        scores = jnp.where(-behind <= right, scores, -jnp.inf)
    return scores


def _weights(scores, lse):
    """Probabilities; 0 in a row that attends to nothing, whose lse is -inf."""
    return jnp.exp(scores - jnp.where(lse == -jnp.inf, 0, lse)[..., None])
