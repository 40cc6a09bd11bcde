"""The dropout mask depends on key and position only."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import dot_product_attention, dropout_mask, explain, xla
from attn_dispatch import ragged_dot_product_attention as ragged
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.reason import reason_from_sentence
from attn_dispatch.xla.dropout import dropout_head_keys, dropout_keep_mask
from tests.support.option_parts import options_with


def spec_of(b: int, keys: Any, impl: str, rate: float = 0.3, t: int = 6, s: int = 9) -> Any:
    shapes = {"query": (b, t, 4, 8), "key": (b, s, 2, 8), "value": (b, s, 2, 8)}
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()]
    options = options_with(
        operands=(*shapes, "dropout_key"), scale=1.0, dropout_rate=rate, dropout_impl=impl
    )
    return AttentionSpec.of([*avals, keys], options)


def mask(b: int, keys: Any, impl: str, start: int = 0, size: int = 6, **more: Any) -> np.ndarray:
    spec = spec_of(b, keys, impl, **more)
    head_keys = dropout_head_keys(spec, {"dropout_key": keys})
    assert head_keys is not None
    return np.asarray(dropout_keep_mask(spec, head_keys, start, size))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_each_of_several_keys_draws_the_mask_it_draws_alone(impl):
    keys = jax.random.key_data(jax.random.split(jax.random.key(3, impl=impl), 3))
    together = mask(6, keys, impl)
    assert together.shape == (6, 4, 6, 9)
    for d in range(3):
        np.testing.assert_array_equal(together[2 * d : 2 * d + 2], mask(2, keys[d : d + 1], impl))
    assert (together[:2] != together[2:4]).any()
    assert (together[0] != together[1]).any()


def test_rows_do_not_depend_on_the_block_that_draws_them():
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), 2))
    whole = mask(4, keys, "threefry2x32")
    part = mask(4, keys, "threefry2x32", start=1, size=4)
    np.testing.assert_array_equal(part, whole[:, :, 1:5])


def test_heads_and_batch_rows_do_not_depend_on_the_block_that_draws_them():
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), 2))
    whole = mask(4, keys, "threefry2x32")
    spec = spec_of(4, keys, "threefry2x32")
    head_keys = dropout_head_keys(spec, {"dropout_key": keys})
    assert head_keys is not None
    part = dropout_keep_mask(spec, head_keys[1:3, 2:], 3, 2)
    np.testing.assert_array_equal(part, whole[1:3, 2:, 3:5])


@pytest.mark.parametrize("rate", [0.001, 0.3, 0.9])
def test_entries_are_dropped_independently_at_the_rate(rate):
    keys = jax.random.key_data(jax.random.key(5))[None]
    dropped = ~mask(2, keys, "threefry2x32", rate=rate, t=200, s=200, size=200)
    spread = np.sqrt(rate * (1 - rate))
    assert abs(dropped.mean() - rate) < 5 * spread / np.sqrt(dropped.size)
    # Batch rows, heads, queries and keys all follow the rate, and neighbours are independent.
    for axis in range(dropped.ndim):
        count = dropped.size / dropped.shape[axis]
        others = tuple(i for i in range(dropped.ndim) if i != axis)
        assert np.abs(dropped.mean(axis=others) - rate).max() < 6 * spread / np.sqrt(count)
    for axis in range(dropped.ndim):
        both = dropped & np.roll(dropped, 1, axis=axis)
        assert abs(both.mean() - rate**2) < 6 * spread / np.sqrt(dropped.size)


def test_no_head_keys_without_dropout():
    keys = jax.random.key_data(jax.random.key(5))[None]
    spec = spec_of(2, keys, "threefry2x32", rate=0.0)
    assert dropout_head_keys(spec, {"dropout_key": keys}) is None


RATE = 0.4
KEY = jax.random.key(11)
Q = np.random.default_rng(0).standard_normal((2, 5, 4, 8), np.float32)
K = np.random.default_rng(1).standard_normal((2, 7, 2, 8), np.float32)
# Each key has a separate value column, so that the output holds the probabilities.
V = np.broadcast_to(np.eye(7, dtype=np.float32)[:, None], (2, 7, 2, 7))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "return_lse": True},
        {"bias": np.ones((4, 5, 7), np.float32), "return_max_logits": True},
        {"query_segment_ids": [[1, 1, 2, 2, 2]] * 2,
         "key_value_segment_ids": [[1, 1, 1, 2, 2, 2, 2]] * 2, "max_segments": 2},
        {"implementation": "xla"},
    ],
)  # fmt: skip
def test_dropout_mask_is_the_mask_that_the_call_uses(options: dict[str, Any]):
    options = options | {"dropout_rate": RATE, "dropout_key": KEY}
    keep = dropout_mask(Q, K, V, **options)
    assert (keep.shape, keep.dtype) == ((2, 4, 5, 7), jnp.bool_)
    out = dot_product_attention(Q, K, V, **options)
    dropped = np.swapaxes(out[0] if isinstance(out, tuple) else out, 1, 2)
    whole = dot_product_attention(Q, K, V, **options | {"dropout_rate": 0.0})
    p = np.swapaxes(whole[0] if isinstance(whole, tuple) else whole, 1, 2)
    np.testing.assert_allclose(dropped, np.where(keep, p / (1 - RATE), 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(jax.jit(lambda q: dropout_mask(q, K, V, **options))(Q), keep)


def test_dropout_mask_of_unbatched_empty_and_packed_calls():
    unbatched = dropout_mask(Q[0], K[0], V[0], dropout_rate=RATE, dropout_key=KEY)
    assert unbatched.shape == (4, 5, 7)
    assert dropout_mask(Q, K, V).all()
    assert dropout_mask(Q, K, V, dropout_key=KEY).all()  # nothing is drawn at rate 0
    assert dropout_mask(Q, K[:, :0], V[:, :0]).shape == (2, 4, 5, 0)
    packed: dict[str, Any] = {
        "cu_seqlens_q": [0, 2, 5], "cu_seqlens_kv": [0, 4, 7], "max_seqlen_q": 3,
        "max_seqlen_kv": 4, "dropout_rate": RATE, "dropout_key": KEY,
    }  # fmt: skip
    keep = dropout_mask(Q[0], K[0], V[0], **packed)
    out = np.swapaxes(ragged(Q[0], K[0], V[0], **packed), 0, 1)
    assert keep.shape == out.shape
    assert not out[~np.asarray(keep)].any() and out.any()


def test_dropout_mask_depends_on_key_position_and_shape_only():
    options: dict[str, Any] = {"dropout_rate": RATE, "dropout_key": KEY}
    keep = dropout_mask(Q, K, V, **options)
    others = dropout_mask(2 * Q, K - 1, V[..., :3], is_causal=True, scale=3.0, **options)
    np.testing.assert_array_equal(keep, others)
    assert (keep != dropout_mask(Q, K, V, **options | {"dropout_key": jax.random.key(12)})).any()
    half = (x.astype(np.float16) for x in (Q, K, V))
    np.testing.assert_array_equal(dropout_mask(*half, **options), keep)


class _SecondXla:
    """XLA under another name, which refuses some calls and returns no dropout mask."""

    NAME = "other"
    IS_EXTRA = False
    HAS_DECODING_KERNEL = False
    SKIPS_FROM_BOTTOM_RIGHT = True
    PLATFORM = None
    unusable_reason = staticmethod(xla.unusable_reason)
    plan = staticmethod(xla.plan)

    def __init__(self, refused: str):
        self.refused = refused
        self.ran: list[str] = []

    def not_supported_reasons(self, spec, device):
        del device
        found = ["returns no dropout mask"] * spec.wanted.needs_keep
        found += [self.refused] * bool(self.refused and self.refused in str(spec))
        return tuple(reason_from_sentence(self.NAME, x) for x in found)

    def forward(self, spec, device, operands):
        self.ran.append("forward")
        return xla.forward(spec, device, operands)

    def backward(self, spec, device, operands):
        self.ran.append("backward")
        return xla.backward(spec, device, operands)


def install_other(monkeypatch, refused: str) -> _SecondXla:
    """Offer calls to "other" first, which refuses specs whose text contains `refused`."""
    implementation = _SecondXla(refused)
    monkeypatch.setattr(select, "IMPLEMENTATIONS", (implementation, xla))
    return implementation


def loss(q, rate: float = RATE, **options: Any):
    out = dot_product_attention(q, K, V, dropout_rate=rate, dropout_key=KEY, **options)
    return (out[0] if isinstance(out, tuple) else out).sum()


def test_one_implementation_computes_both_directions_under_dropout(monkeypatch):
    """Implementations draw different masks: one that cannot run backward must not run forward."""
    monkeypatch.setenv("ATTN_DISPATCH_FALLBACK", "silent")
    accepts_all = install_other(monkeypatch, "")
    jax.jit(jax.grad(loss))(Q)
    assert accepts_all.ran == ["forward", "backward"]

    refuses = install_other(monkeypatch, "backward(")
    jax.jit(jax.grad(loss))(Q)
    assert refuses.ran == []
    jax.jit(loss)(Q)  # not differentiated, yet the same choice as when it is
    jax.jit(jax.grad(lambda x: x * loss(Q)))(1.0)
    assert refuses.ran == []
    jax.jit(jax.grad(lambda q: loss(q, rate=0.0)))(Q)  # without dropout there is no mask to match
    assert refuses.ran == ["forward"]

    only_backward = install_other(monkeypatch, "forward(")
    jax.jit(jax.grad(loss))(Q)
    assert only_backward.ran == []


@pytest.mark.parametrize("refused", ["", "forward(", "backward(", "bias", "gradients of query"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_dropout_mask_comes_from_the_implementation_that_trains(monkeypatch, refused, has_bias):
    """The implementation chosen for all gradients also runs inference and returns the mask."""
    monkeypatch.setenv("ATTN_DISPATCH_FALLBACK", "silent")
    bias = np.zeros((4, 5, 7), np.float32) if has_bias else None

    def chosen(program: Any, *arrays: Any) -> str:
        second = install_other(monkeypatch, refused)
        try:
            jax.jit(program).lower(*arrays)
        except NotImplementedError as error:
            assert "returns no dropout mask" in str(error)
            return "other"
        return "other" if second.ran else "xla"

    def call(function: Any, q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        return function(q, k, v, bias, dropout_rate=RATE, dropout_key=KEY)

    def summed(*arrays: Any) -> jax.Array:
        return call(dot_product_attention, *arrays).sum()

    arrays = (Q, K, V, bias)
    training = chosen(jax.grad(summed, (0, 1, 2, 3) if has_bias else (0, 1, 2)), *arrays)
    assert chosen(summed, *arrays) == training
    assert chosen(partial(call, dropout_mask), *arrays) == training
    named = partial(call, partial(dot_product_attention, implementation="other"))
    if refused == "backward(":  # a named implementation needs no backward pass for inference
        assert chosen(named, *arrays) == "other"


def test_both_directions_assume_a_gradient_of_lse(monkeypatch):
    """The cotangent of lse is zero here, which the forward pass cannot know."""
    monkeypatch.setenv("ATTN_DISPATCH_FALLBACK", "silent")
    refuses = install_other(monkeypatch, "lse_grad")
    jax.jit(jax.grad(lambda q: loss(q, return_lse=True)))(Q)
    assert refuses.ran == []
    jax.jit(jax.grad(loss))(Q)
    assert refuses.ran == ["forward", "backward"]


def test_vmap_of_the_backward_pass_alone_keeps_its_shape(monkeypatch):
    """Another shape could choose another implementation: "other" refuses calls with three keys."""
    monkeypatch.setenv("ATTN_DISPATCH_FALLBACK", "silent")
    refuses = install_other(monkeypatch, "dropout_key uint32[3, 2]")

    def call(q):
        return dot_product_attention(q, K, V, dropout_rate=RATE, dropout_key=KEY)

    @jax.jit
    def pulled(q, out_grads):
        return jax.vmap(jax.vjp(call, q)[1])(out_grads)[0]

    out_grads = np.random.default_rng(2).standard_normal((3, 2, 5, 4, 7), np.float32)
    got = pulled(Q, out_grads)
    assert refuses.ran == ["forward", "backward"]
    for x, out_grad in zip(got, out_grads, strict=True):
        np.testing.assert_allclose(x, jax.vjp(call, Q)[1](out_grad)[0], rtol=1e-5, atol=1e-6)


def test_dropout_mask_raises_where_the_implementation_cannot_return_it(monkeypatch):
    """The mask of another implementation would be wrong."""
    install_other(monkeypatch, "")

    def mask(q, **options: Any):
        return dropout_mask(q, K, V, dropout_rate=RATE, dropout_key=KEY, **options)

    with pytest.raises(NotImplementedError, match=r"(?s)other:\n +- returns no dropout mask"):
        jax.jit(mask)(Q)
    assert not jax.jit(partial(mask, implementation="xla"))(Q).all()


def test_explain_shows_the_reason_from_the_other_direction():
    q = jax.ShapeDtypeStruct((1, 16384, 2, 128), jnp.bfloat16)
    slopes = jax.ShapeDtypeStruct((2,), jnp.float32)
    options: dict[str, Any] = {"alibi_slopes": slopes, "target": "gfx942"}
    assert explain(q, q, q, **options).chosen_forward == "aiter"
    explanation = explain(q, q, q, **options, dropout_rate=0.1, dropout_key=KEY)
    assert (explanation.chosen_forward, explanation.chosen_backward) == ("xla", "xla")
    text = " ".join(str(explanation).split())
    assert "(in the backward pass, which must draw the same dropout mask)" in text
    limit = "the kernel's mask, (1, 2, 16384, 16384); the limit is 134,217,728 entries"
    assert text.count(limit) == 1 and f"{limit} (remedy: " not in text
    q = jax.ShapeDtypeStruct((2, 8192, 2, 128), jnp.bfloat16)
    explanation = explain(q, q, q, **options, dropout_rate=0.1, dropout_key=KEY)
    assert "entries (remedy: make calls for a part of the batch each)" in " ".join(
        str(explanation).split()
    )


def test_explain_names_the_owner_of_the_mask_in_xlas_backward_pass():
    q = jax.ShapeDtypeStruct((1, 8192, 2, 128), jnp.bfloat16)
    options: dict[str, Any] = {"logits_soft_cap": 30.0, "dropout_rate": 0.1, "dropout_key": KEY}
    explanation = explain(q, q, q, **options, target="gfx942")
    assert (explanation.chosen_forward, explanation.chosen_backward) == ("aiter", "xla")
    assert "under the dropout mask of aiter" in str(explanation)


def test_sharded_dropout_same_refuses_kernels():
    """Kernels that number each shard's rows and heads from 0 cannot draw the same mask."""
    call = (jnp.zeros((1, 64, 2, 64), jnp.bfloat16),) * 3
    options = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0), "target": "gfx942"}
    with attn_dispatch.sharded_dropout("same"):
        same = str(attn_dispatch.explain(*call, **options))
    assert "sharded_dropout" in same and "sharded_dropout" not in str(
        attn_dispatch.explain(*call, **options)
    )
