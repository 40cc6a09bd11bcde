"""Options that no layer of Flax overrides, and models whose layers get our attention."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import linen, nnx

from attn_dispatch import AttentionConventionWarning, explain_program
from attn_dispatch.integrations.flax import attention, attention_fn, replace_attention

HAS_CAUSAL = "is_causal" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters
needs_causal = pytest.mark.skipif(not HAS_CAUSAL, reason="needs Flax 0.12.8")

B, T, N, D = 2, 5, 4, 16
X = np.random.default_rng(3).standard_normal((B, T, D)).astype(np.float32)
CAUSAL = np.tri(T, dtype=bool)[None, None]


def nnx_layer(**options: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0), **options)


def kernels_in(function: Callable[..., Any], *arguments: Any) -> int:
    calls = explain_program(function, *arguments, target="cpu").calls
    return sum(call.forward_runs.times for call in calls)


def conventions(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        call()
    given = [x for x in given if x.category is AttentionConventionWarning]
    assert all(x.filename == __file__ for x in given)
    return [str(x.message) for x in given]


@needs_causal
def test_a_layers_default_does_not_override_an_option():
    layer = nnx_layer(attention_fn=attention(is_causal=True))
    np.testing.assert_allclose(layer(X), nnx_layer()(X, mask=CAUSAL), atol=2e-6)
    np.testing.assert_array_equal(layer(X, is_causal=True), layer(X))


def test_a_linen_layer_keeps_the_options_too():
    layer = linen.MultiHeadDotProductAttention(
        N, attention_fn=attention(is_causal=True, local_window_size=(1, 0))
    )
    theirs = linen.MultiHeadDotProductAttention(N)
    params = theirs.init(jax.random.key(0), X)
    near = CAUSAL & ~np.tri(T, k=-2, dtype=bool)
    np.testing.assert_allclose(
        layer.apply(params, X), theirs.apply(params, X, mask=near), atol=2e-6
    )


def test_what_a_layer_passes_must_not_differ_from_an_option():
    layer = nnx_layer(attention_fn=attention(mask=CAUSAL))
    np.testing.assert_allclose(layer(X), nnx_layer()(X, mask=CAUSAL), atol=2e-6)
    message = r"mask: expected bool\[1, 1, 5, 5\], as attention.*, got another array bool\[1, 1, 5"
    with pytest.raises(ValueError, match=message):
        layer(X, mask=CAUSAL.copy())
    if HAS_CAUSAL:
        with pytest.raises(ValueError, match=r"is_causal: expected False, .*, got True"):
            nnx_layer(attention_fn=attention(is_causal=False))(X, is_causal=True)


def test_an_option_that_attention_does_not_have_is_refused():
    with pytest.raises(TypeError, match="'window_size': here it is local_window_size"):
        attention(window_size=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="dropout_rate: expected it in the layer"):
        attention(dropout_rate=0.1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match=r"query: expected it in each call .*, got it in attent"):
        attention(query=X)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="local_window_size: expected a non-negative int or a"):
        attention(local_window_size="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="return_lse: expected no further results"):
        attention(return_lse=True)  # pyright: ignore[reportCallIssue]


def test_a_causal_option_from_the_bottom_right_decodes():
    """The option is right for whole sequences and for single queries, whose mask Flax makes."""
    layers = [
        nnx.MultiHeadAttention(N, D, decode=True, rngs=nnx.Rngs(0), **options)
        for options in (
            {},
            {"attention_fn": attention(is_causal=True, causal_alignment="bottom_right")},
        )
    ]
    for layer in layers:
        layer.init_cache(X.shape)
    for i in range(T):
        expected, got = (layer(X[:, i : i + 1]) for layer in layers)
        np.testing.assert_allclose(got, expected, atol=2e-6)
    np.testing.assert_allclose(layers[1](X, decode=False), nnx_layer()(X, mask=CAUSAL), atol=2e-6)


@needs_causal
def test_a_partial_that_a_layer_overrides_warns():
    layer = nnx_layer(attention_fn=functools.partial(attention_fn, is_causal=True))
    (message,) = conventions(lambda: [layer(X) for _ in range(2)])
    assert message.startswith(
        "partial(attention_fn, is_causal=True): the layer passes is_causal=False, which overrides "
        "it. Use attention(is_causal=True)"
    )
    assert conventions(lambda: layer(X, is_causal=True)) == []
    near = nnx_layer(attention_fn=functools.partial(attention_fn, local_window_size=(1, 0)))
    assert conventions(lambda: near(X)) == []
    for options, warned in (({"is_causal": True}, False), ({"broadcast_dropout": False}, True)):
        layer = linen.MultiHeadDotProductAttention(
            N, attention_fn=functools.partial(attention_fn, **options)
        )
        messages = conventions(lambda layer=layer: layer.init(jax.random.key(0), X))
        assert ["the layer passes broadcast_dropout=True" in x for x in messages] == [True] * warned


class Layers(nnx.Module):
    """A model that someone else wrote, with a list of layers."""

    def __init__(self) -> None:
        made = [nnx_layer(), nnx_layer()]
        self.layers = nnx.List(made) if hasattr(nnx, "List") else made

    def __call__(self, x: Any, **masks: Any) -> Any:
        for layer in self.layers:
            x = layer(x, **masks)
        return x


def test_an_nnx_model_gets_our_attention_in_place():
    model = Layers()
    expected = model(X, mask=CAUSAL)
    assert replace_attention(model, is_causal=True) is model
    np.testing.assert_allclose(model(X), expected, atol=2e-6)
    assert kernels_in(lambda x: model(x), X) == 2
    with pytest.raises(ValueError, match=r"expected layers with Flax's .*, got Linear"):
        replace_attention(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"found MultiHeadAttention\.attention_fn=<function other"):
        replace_attention(nnx_layer(attention_fn=other))
    with pytest.raises(TypeError, match="expected a module of NNX or Linen, got list"):
        replace_attention([model])  # pyright: ignore


def other(query: Any, key: Any, value: Any, **_: Any) -> Any:
    return query


class Block(linen.Module):
    @linen.compact
    def __call__(self, x: Any, mask: Any = None) -> Any:
        return x + linen.MultiHeadDotProductAttention(N)(x, mask=mask)


class Stack(linen.Module):
    """Layers made in a scan under remat."""

    @linen.compact
    def __call__(self, x: Any, mask: Any = None) -> Any:
        scan = linen.scan(
            lambda block, x, _: (block(x, mask), None),
            variable_axes={"params": 0}, split_rngs={"params": True}, length=2,
        )  # fmt: skip
        return scan(linen.remat(Block)(), x, None)[0]

    def size(self) -> int:
        return 2


class NnxSelfAttention(nnx.Module):
    """Attention by einsum."""

    def __call__(self, x: Any) -> Any:
        return jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)) @ x


class Wrapper(nnx.Module):
    """A layer named like attention around one that is replaced."""

    def __init__(self) -> None:
        self.inner = nnx_layer()
        self.norm = nnx.LayerNorm(D, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.norm(self.inner(x))


class WrapperAttention(Wrapper):
    pass


class LinearAttention(nnx.Module):
    def __call__(self, x: Any) -> Any:
        return x


@needs_causal
def test_nnx_layers_that_stay_beside_replaced_ones_are_named():
    precise = functools.partial(nnx.dot_product_attention, precision="highest")
    windowed = attention(local_window_size=(1, 0))
    custom = (nnx_layer(), nnx_layer(attention_fn=precise), nnx_layer(attention_fn=windowed))
    model = nnx.Sequential(*custom, NnxSelfAttention(), Wrapper())
    (message,) = conventions(lambda: replace_attention(model, is_causal=True))
    assert message.startswith(
        "replace_attention: these layers stay as they are, without is_causal=True: "
        "layers/1: MultiHeadAttention.attention_fn=functools.partial("
    )
    assert "; layers/2: MultiHeadAttention.attention_fn=attn_dispatch's, with other opt" in message
    assert "; layers/3: NnxSelfAttention. Make a layer with attention_fn=attention(" in message
    assert message.count("layers/") == 3
    assert kernels_in(lambda x: model(x), X) == 3  # of layers 0, 2 and 4

    fine = nnx.Sequential(nnx_layer(), WrapperAttention(), LinearAttention())
    assert conventions(lambda: replace_attention(fine, is_causal=True)) == []
    own = nnx.Sequential(nnx_layer(), nnx_layer(attention_fn=windowed))
    assert conventions(lambda: replace_attention(own)) == []  # no option is lost


def test_a_model_is_replaced_once():
    for model in (nnx_layer(), linen.MultiHeadDotProductAttention(N)):
        ours = replace_attention(model)
        with pytest.raises(ValueError, match=r"a model that was not replaced, got MultiHead"):
            replace_attention(ours)


class LinenSelfAttention(linen.Module):
    """Attention by einsum."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, linen.Dense(D)(x))) @ x


class Mixed(linen.Module):
    """Layers that are replaced, and layers that cannot be."""

    functions: tuple[Any, ...]
    has_einsum: bool = False

    @linen.compact
    def __call__(self, x: Any) -> Any:
        for function in self.functions:
            x = Block()(x)
            x = linen.MultiHeadDotProductAttention(N, attention_fn=function)(linen.Dense(D)(x))
        return LinenSelfAttention(name="last")(x) if self.has_einsum else x


def test_linen_layers_that_stay_beside_replaced_ones_are_named():
    precise = functools.partial(linen.dot_product_attention, precision="highest")
    model = replace_attention(Mixed((precise,), has_einsum=True), is_causal=True)
    messages = conventions(lambda: [model.init(jax.random.key(0), X) for _ in range(2)])
    (message,) = messages
    assert message.startswith(
        "replace_attention: these layers stay as they are, without is_causal=True: "
        "MultiHeadDotProductAttention_0: MultiHeadDotProductAttention.attention_fn=functools."
    )
    assert "; last: LinenSelfAttention. Make" in message
    windowed = attention(local_window_size=(1, 0))
    for options, number in (({}, 0), ({"is_causal": True}, 1)):
        model = replace_attention(Mixed((windowed,)), **options)
        assert len(conventions(lambda model=model: model.init(jax.random.key(0), X))) == number


LIFTED = (
    linen.remat(Block)(),
    linen.jit(Block)(),
    linen.remat(linen.remat(Stack))(),
    linen.remat(linen.MultiHeadDotProductAttention)(N),
    linen.jit(linen.MultiHeadDotProductAttention)(N),
)


@pytest.mark.parametrize(
    "model", [Block(), Stack(), linen.MultiHeadDotProductAttention(N), *LIFTED]
)
def test_a_linen_model_gets_our_attention_with_the_same_parameters(model: Any):
    params = model.init(jax.random.key(0), X)
    ours = replace_attention(model, is_causal=True)
    jax.tree.map(np.testing.assert_array_equal, params, ours.init(jax.random.key(0), X))
    expected = model.apply(params, X, mask=CAUSAL)
    np.testing.assert_allclose(ours.apply(params, X), expected, atol=2e-6)
    layers = 2 if isinstance(model, Stack) else 1
    assert kernels_in(lambda x: ours.apply(params, x), X) == layers
    bound = ours.bind(params)
    assert kernels_in(lambda x: bound(bound(x)), X) == 2 * layers
    assert kernels_in(lambda x: model.apply(params, x), X) == 0
    assert repr(ours).splitlines()[0] == repr(model).splitlines()[0]


def test_a_replaced_linen_model_can_be_part_of_another():
    class Outer(linen.Module):
        inner: Any

        @linen.compact
        def __call__(self, x: Any) -> Any:
            return self.inner(x)

    params = Outer(Block()).init(jax.random.key(0), X)
    ours = Outer(replace_attention(Block()))
    assert kernels_in(lambda x: ours.apply(params, x), X) == 1
    np.testing.assert_allclose(ours.apply(params, X), Outer(Block()).apply(params, X), atol=2e-6)


def test_only_rows_of_queries_that_a_mask_hides_differ():
    is_real = np.arange(T) < np.array([[3], [T]])
    layer = linen.MultiHeadDotProductAttention(N)
    params, ours = layer.init(jax.random.key(0), X), replace_attention(layer)
    mask = linen.make_attention_mask(is_real, is_real)
    theirs, out = (np.asarray(x.apply(params, X, mask=mask)) for x in (layer, ours))
    np.testing.assert_allclose(out[is_real], theirs[is_real], atol=2e-6)
    hidden = np.asarray(params["params"]["out"]["bias"])
    np.testing.assert_array_equal(out[~is_real], np.broadcast_to(hidden, (2, D)))
    assert abs(theirs[~is_real] - hidden).max() > 0.01


def test_a_linen_model_without_flaxs_attention_warns():
    class Einsum(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            scores = jnp.einsum("btd,bsd->bts", x, linen.Dense(D)(x))
            return jax.nn.softmax(scores) @ x

    for theirs in (Einsum, linen.remat(Einsum)):
        model = replace_attention(theirs())
        (message,) = conventions(lambda model=model: model.init(jax.random.key(0), X))
        name = theirs.__name__
        assert message.startswith(f"replace_attention: {name} calls no attention function of Flax")
    alone = replace_attention(Mixed((), has_einsum=True))
    (message,) = conventions(lambda: alone.init(jax.random.key(0), X))
    assert "in a field of a layer; found last: LinenSelfAttention; attention by" in message
    stack = replace_attention(Stack())
    assert conventions(lambda: stack.apply({}, method="size")) == []
