"""Attention that is no call of attn_dispatch is found in a program, and nothing else is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch import explain_program
from tests.support.program_lists import struct

Q = struct(2, 16, 4, 8, dtype="float32")


def by_einsum(q: Any, k: Any, v: Any) -> jax.Array:
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 8**0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, 30 * jnp.tanh(scores / 30), -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(v.dtype), v)


def with_a_gate(q: Any, k: Any, v: Any) -> jax.Array:
    """A gate for each query and head, itself a product, multiplies the weights."""
    gate = jnp.einsum("btnh,nh->bnt", q, jnp.ones((4, 8)))[..., None]
    weights = gate * jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def by_log_sum_exp(q: Any, k: Any, v: Any) -> jax.Array:
    scores = jnp.einsum("btnh,bsnh->bnts", q, k)
    lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.einsum("bnts,bsnh->btnh", jnp.exp(scores - lse), v)


def of_one_head(q: Any, k: Any, v: Any) -> jax.Array:
    """Attention without batch dims on projections."""
    q, k, v = (x.reshape(-1, 8) @ jnp.ones((8, 8)) for x in (q, k, v))
    return jax.nn.softmax(q @ k.T) @ v


def in_blocks(q: Any, k: Any, v: Any) -> jax.Array:
    """Blocks of 4 keys, merged as FlashAttention does."""

    def block(carry: Any, kv: Any) -> Any:
        top, total, out = carry
        scores = jnp.einsum("btnh,bsnh->btns", q, kv[0])
        new = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights, again = jnp.exp(scores - new), jnp.exp(top - new)
        total = total * again + weights.sum(-1, keepdims=True)
        return (new, total, out * again + jnp.einsum("btns,bsnh->btnh", weights, kv[1])), None

    zero = jnp.zeros((*q.shape[:-1], 1))
    blocks = [x.reshape(2, 4, 4, 4, 8).swapaxes(0, 1) for x in (k, v)]
    _, total, out = jax.lax.scan(block, (zero - jnp.inf, zero, zero * q), blocks)[0]
    return out / total


def with_a_sink(q: Any, k: Any, v: Any) -> jax.Array:
    """A score of each head takes part in the softmax, and its weight is cut off."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k)
    sinks = jnp.broadcast_to(jnp.ones((4, 1, 1)), (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1))[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def of_some_keys(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
    return jnp.einsum("bnts,bsnh->btnh", weights[..., :10], v[:, :10])


def of_split_keys(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
    first, last = jnp.split(weights, 2, -1)
    return jnp.einsum("bnts,bsnh->btnh", first - last, v[:, :8])


def without_the_first_key(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
    return jnp.einsum("bnts,bsnh->btnh", weights.at[..., 0].set(0), v)


@pytest.mark.parametrize("is_training", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize(
    ("attention", "runs"),
    [
        *((by_einsum, 1), (with_a_gate, 1), (by_log_sum_exp, 1), (of_one_head, 1), (in_blocks, 4)),
        *((with_a_sink, 1), (of_some_keys, 1), (of_split_keys, 1), (without_the_first_key, 1)),
    ],
)
def test_attention_by_matrix_products_is_found(attention: Any, runs: int, is_training: bool):
    program = attention
    if is_training:
        program = jax.grad(lambda *x: attention(*x).sum(), argnums=(0, 1, 2))
    found = explain_program(program, Q, Q, Q, target="h100")
    assert found.calls == () and "no attention call of attn_dispatch" in str(found)
    (other,) = found.others
    assert other.runs.times == runs and other.place is not None
    assert other.place.file == __file__ and other.place.function.startswith(attention.__name__)
    code = attention.__code__
    assert code.co_firstlineno < other.place.line <= max(x[2] or 0 for x in _lines(code))
    assert other.what == "attention by matrix products: dot_general, softmax, dot_general"


def _lines(code: Any) -> list[Any]:
    inner = [x for x in code.co_consts if hasattr(x, "co_lines")]
    return [*code.co_lines(), *(line for x in inner for line in _lines(x))]


@pytest.mark.parametrize("implementation", ["xla", "cudnn", None])
def test_the_call_of_jax_nn_is_found(implementation: Any):
    """The call of cuDNN is traced too where there is none."""
    q = struct(2, 128, 4, 64)

    def loss(q: Any) -> jax.Array:
        out = jax.nn.dot_product_attention(q, q, q, implementation=implementation)
        return out.astype(jnp.float32).sum()

    found = explain_program(jax.grad(loss), q, target="h100")
    names = [x.what for x in found.others]
    on_cudnn = [f"jax.nn.dot_product_attention on cuDNN, {x}" for x in ("forward", "backward")]
    assert names == (
        on_cudnn if implementation == "cudnn" else ["jax.nn.dot_product_attention on XLA"]
    )
    lines = {x.place and x.place.line for x in found.others}
    assert lines == {loss.__code__.co_firstlineno + 1}
    if implementation == "cudnn":
        with pytest.raises(RuntimeError, match="cuDNN is not detected"):
            jax.eval_shape(loss, q)  # JAX is as before


def mixture_of_experts(x: Any, router: Any, experts: Any) -> jax.Array:
    weights = jax.nn.softmax(x @ router)
    hidden = jax.nn.softplus(jnp.einsum("td,edf->etf", x, experts))
    return jnp.einsum("te,etd->td", weights, jnp.einsum("etf,efd->etd", hidden, experts))


def without_a_sum(x: Any, _: Any, experts: Any) -> jax.Array:
    """Exponentials of products that are not divided by their sum."""
    y = jnp.einsum("td,edf->etf", x, experts)
    return jnp.einsum("ets,esf->etf", jnp.exp(-(jnp.einsum("etf,esf->ets", y, y) ** 2)), y)


def cross_entropy(x: Any, embedding: Any, _: Any) -> jax.Array:
    return -jax.nn.log_softmax(jax.nn.gelu(x @ embedding) @ embedding.T)[:, 0]


def of_chosen_experts(x: Any, router: Any, experts: Any) -> jax.Array:
    """Weights of which some are cut off and chosen, as in a mixture of experts."""
    weights = jax.nn.softmax(x @ router)[:, :3]
    chosen = jnp.take_along_axis(weights, jnp.argmax(weights, -1, keepdims=True), -1)
    return chosen * jnp.einsum("te,ted->td", weights, jnp.einsum("td,edf->tef", x, experts[:3]))


@pytest.mark.parametrize(
    "function", [mixture_of_experts, of_chosen_experts, without_a_sum, cross_entropy]
)
def test_other_softmaxes_are_no_attention(function: Any):
    x = struct(8, 16, dtype="float32")
    args = (x, struct(16, 4, dtype="float32"), struct(4, 16, 16, dtype="float32"))
    step = jax.grad(lambda *x: function(*x).sum(), argnums=(0, 1))
    assert explain_program(step, *args, target="h100").others == ()
