"""Attention under a dense mask by formulas, exact and in 16 bits, to judge kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

_SLACK = 1e-5
_STATISTIC_ULPS = 4
"""Units in the last place by which lse may be off beside that: kernels use fast functions."""


@dataclass(frozen=True)
class Inputs:
    """query [B, T, N, H], key [B, S, K, H], value [B, S, K, Hv], the gradients of the results,
    out_grad [B, T, N, Hv] and lse_grad [B, N, T], and perhaps sinks, float32 [1|B, N]."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    out_grad: jax.Array
    lse_grad: jax.Array
    sinks: jax.Array | None = None


jax.tree_util.register_dataclass(Inputs)

Results = tuple[jax.Array, ...]
"""out, lse, and the gradients of query, key, value and, if there are any, sinks."""

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def drawn(seed: int, shape: tuple[int, int, int, int, int], dims: tuple[int, int], dtype) -> Inputs:
    """Normally distributed arrays of a shape (B, T, S, N, K)."""
    b, t, s, n, k = shape
    h, hv = dims
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, hv), (b, t, n, hv))
    arrays = [
        jax.random.normal(key, shape, jnp.float32).astype(dtype)
        for key, shape in zip(keys, shapes, strict=False)
    ]
    return Inputs(*arrays, jax.random.normal(keys[4], (b, n, t), jnp.float32))


ScoreMod = Callable[..., jax.Array]
"""(score, b, n, t, s) -> score, of scalars."""


def _all_pairs(mod: ScoreMod, scores: jax.Array) -> jax.Array:
    """The mod's results for all scores [B, N, T, S]."""
    for axis in reversed(range(4)):
        mod = jax.vmap(mod, (0, *(0 if i == axis else None for i in range(4))))
    return mod(scores, *(jnp.arange(x, dtype=jnp.int32) for x in scores.shape))


@partial(jax.jit, static_argnames=("scale", "is_exact", "mod"))
def computed(
    inputs: Inputs,
    seen: jax.Array,
    scale: float,
    *,
    is_exact: bool,
    mod: ScoreMod | None = None,
) -> Results:
    """The results in float32, or with operands of matrix products in the inputs' dtype.

    Args:
      inputs: the arrays of the call.
      seen: the mask, bool [1|B, 1|N, T, S].
      scale: the factor of scores.
      is_exact: whether to compute in float32 throughout.
      mod: a score_mod.
    """
    dtype = jnp.float32 if is_exact else inputs.query.dtype
    precision = "highest" if is_exact else "default"
    groups = inputs.query.shape[2] // inputs.key.shape[2]

    def product(equation: str, *arrays: jax.Array) -> jax.Array:
        narrow = (x.astype(dtype) for x in arrays)
        return jnp.einsum(
            equation, *narrow, precision=precision, preferred_element_type=jnp.float32
        )

    k, v = (jnp.repeat(x, groups, axis=2) for x in (inputs.key, inputs.value))
    scores = scale * product("btnh,bsnh->bnts", inputs.query, k)
    pull = None
    if mod is not None:
        scores, pull = jax.vjp(partial(_all_pairs, mod), scores)
    scores = jnp.where(seen, scores, -jnp.inf)
    top = scores.max(axis=3, keepdims=True)
    is_live = top > -jnp.inf
    top = jnp.where(is_live, top, 0)
    sinks = None if inputs.sinks is None else inputs.sinks[:, :, None, None]
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    total = jnp.exp(scores - top).sum(axis=3, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    lse = jnp.where(is_live, top + jnp.log(jnp.where(is_live, total, 1)), -jnp.inf)
    weights = jnp.where(is_live, jnp.exp(scores - jnp.where(is_live, lse, 0)), 0)
    out = product("bnts,bsnh->btnh", weights, v)
    lse_grad = jnp.where(is_live, inputs.lse_grad[..., None], 0)

    weights_grad = product("btnh,bsnh->bnts", inputs.out_grad, v)
    delta = (weights * weights_grad).sum(axis=3, keepdims=True)
    scores_grad = weights * (weights_grad - delta + lse_grad)
    scores_grad = scale * (scores_grad if pull is None else pull(scores_grad)[0])
    dq = product("bnts,bsnh->btnh", scores_grad, k)
    dk = product("bnts,btnh->bsnh", scores_grad, inputs.query)
    dv = product("bnts,btnh->bsnh", weights, inputs.out_grad)
    dk, dv = (_summed(x, groups) for x in (dk, dv))
    narrow = [x.astype(dtype) for x in (out, dq, dk, dv)]
    if inputs.sinks is not None:
        row_grad = (lse_grad - delta)[..., 0]
        # Kernels do not round it, so it is judged more closely than by bfloat16's step.
        narrow.append(sinks_grad(inputs.sinks, lse[..., 0], row_grad).astype(jnp.float16))
    return narrow[0], lse[..., 0], *narrow[1:]


def sinks_grad(sinks: jax.Array, lse: jax.Array, row_grad: jax.Array) -> jax.Array:
    """Σ exp(sink - lse) · row_grad over the rows that see a key, for row_grad [B, N, T]."""
    weights = jnp.exp(sinks[:, :, None] - jnp.where(lse == -jnp.inf, 0, lse))
    grad = jnp.where(lse == -jnp.inf, 0, weights * row_grad).sum(axis=2)
    return grad if len(sinks) > 1 else grad.sum(axis=0, keepdims=True)


def _summed(x: jax.Array, groups: int) -> jax.Array:
    b, s, n, h = x.shape
    return x.reshape(b, s, n // groups, groups, h).sum(axis=3)


@jax.jit
def lost_by_rounding(inputs: Inputs, out: jax.Array, exact: jax.Array) -> Inputs:
    """The inputs with the lse_grad that has the effect of a rounded `out` in a backward pass, which
    computes a row's Σ p · dp as Σ out · dout (attn_dispatch_tools/verify/judge.py)."""
    lost = (exact - out.astype(jnp.float32)) * inputs.out_grad.astype(jnp.float32)
    lse_grad = inputs.lse_grad + jnp.swapaxes(lost.sum(axis=3), 1, 2)
    return replace(inputs, lse_grad=lse_grad)


@jax.jit
def _differences(got: Results, exact: Results, plain: Results) -> list[tuple[jax.Array, ...]]:
    def errors(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        is_finite = jnp.isfinite(y)
        is_same = jnp.where(is_finite, jnp.isfinite(x), x == y).all()
        difference = jnp.where(is_finite, x - jnp.where(is_finite, y, 0), 0)
        largest = jnp.where(is_same, jnp.abs(difference).max(), jnp.inf)
        return largest, jnp.sqrt((difference**2).mean())

    def one(x: jax.Array, y: jax.Array, z: jax.Array) -> tuple[jax.Array, ...]:
        size = jnp.where(jnp.isfinite(y), jnp.abs(y), 0).max()
        return (*errors(x, y), *errors(z, y), size)

    return [one(*x) for x in zip(got, exact, plain, strict=True)]


@dataclass(frozen=True)
class Check:
    """The error of one result, beside that of the plain computation in the same dtype."""

    name: str
    error: float
    allowed: float
    rms: float
    plain_rms: float

    @property
    def is_right(self) -> bool:
        """Whether the error is allowed; 1.5 times as much if the whole array is as exact."""
        loose = 1.5 if self.rms <= 2 * self.plain_rms else 1.0
        return self.error <= loose * self.allowed


def checks(got: Results, exact: Results, plain: Results) -> list[Check]:
    """A check of every result."""
    found = []
    for name, numbers in zip(NAMES, _differences(got, exact, plain), strict=False):
        error, rms, plain_error, plain_rms, size = map(float, numbers)
        step = float(jnp.finfo(plain[NAMES.index(name)].dtype).eps) * size
        allowed = 2 * max(plain_error, step / 2) + _SLACK
        if name == "lse":
            allowed += _STATISTIC_ULPS * float(jnp.finfo(jnp.float32).eps) * size
        found.append(Check(name, error, allowed, rms, plain_rms))
    return found
