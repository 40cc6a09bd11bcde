"""vmap of the public call equals a Python loop over calls, results and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, dropout_mask

SIZE = 3

CALL: dict[str, np.ndarray] = {}
"""The arrays of one call that has every operand, each in the form with a batch axis."""

_rng = np.random.default_rng(0)
for _name, _shape in {
    "query": (2, 5, 4, 8), "key": (2, 6, 2, 8), "value": (2, 6, 2, 7), "bias": (2, 4, 5, 6),
    "sinks": (2, 4), "alibi_slopes": (2, 4),
}.items():  # fmt: skip
    CALL[_name] = _rng.standard_normal(_shape).astype(np.float32)
CALL["mask"] = _rng.random((2, 4, 5, 6)) < 0.8
CALL["query_seq_lengths"] = np.array([5, 3])
CALL["key_value_seq_lengths"] = np.array([4, 6])
CALL["query_segment_ids"] = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 1, 2]])
CALL["key_value_segment_ids"] = np.array([[1, 1, 1, 2, 2, 2], [1, 2, 2, 2, 2, 2]])

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "alibi_slopes")


def varied(name: str, size: int = SIZE) -> np.ndarray:
    """`size` different versions of the operand along a new first axis."""
    x = CALL[name]
    if name.endswith("lengths"):
        return np.stack([np.roll(x, i) for i in range(size)])
    if name.endswith("ids"):
        return np.stack([np.minimum(x, i + 1) for i in range(size)])
    if name == "mask":
        return np.stack([x ^ (i == 1) for i in range(size)])
    return np.stack([x * (1 + 0.5 * i) for i in range(size)])


def attention(**operands: Any) -> tuple[jax.Array, jax.Array]:
    return dot_product_attention(**operands, is_causal=True, return_lse=True)


def loss(operands: dict[str, Any], more: dict[str, Any], out_grad, lse_grad) -> jax.Array:
    out, lse = attention(**operands, **more)
    return (out * out_grad).sum() + (jnp.where(lse == -jnp.inf, 0, lse) * lse_grad).sum()


OUT_GRAD = _rng.standard_normal((2, 5, 4, 7)).astype(np.float32)
LSE_GRAD = _rng.standard_normal((2, 5, 4)).astype(np.float32)


def check(stacked: dict[str, np.ndarray], shared: dict[str, np.ndarray], axes=None, size=SIZE):
    """Results and gradients of vmap equal those of single calls, shared operands included."""
    axes = axes or {}
    float_names = [x for x in DIFFERENTIABLE if x in stacked or x in shared]
    moved = {name: np.moveaxis(x, 0, axes.get(name, 0)) for name, x in stacked.items()}
    in_axes = {name: axes.get(name, 0) for name in stacked} | dict.fromkeys(shared)

    def value_and_grads(operands):
        floats = {name: operands[name] for name in float_names}
        rest = {name: x for name, x in operands.items() if name not in floats}
        return attention(**operands), jax.grad(loss)(floats, rest, OUT_GRAD, LSE_GRAD)

    got = jax.vmap(value_and_grads, in_axes=(in_axes,))(moved | shared)
    for i in range(size):
        alone = value_and_grads({name: x[i] for name, x in stacked.items()} | shared)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", CALL)
def test_vmap_over_one_operand(name: str):
    check({name: varied(name)}, {x: y for x, y in CALL.items() if x != name})


@pytest.mark.parametrize("name", CALL)
def test_vmap_over_all_operands_but_one(name: str):
    check({x: varied(x) for x in CALL if x != name}, {name: CALL[name]})


def test_vmap_over_other_axes():
    axes = {"query": 2, "key": -1, "value": 1, "bias": 4, "mask": 3, "sinks": 2,
            "query_seq_lengths": 1, "key_value_segment_ids": -1}  # fmt: skip
    check({x: varied(x) for x in CALL}, {}, axes)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "shared"])
def test_vmap_of_operands_shared_by_all_rows(mapped: bool):
    """A bias of batch 1, or slopes and sinks of one row, against a query of two rows."""
    names = ("query", "key", "value")
    small = {"bias": CALL["bias"][:1, :, :1], "sinks": CALL["sinks"][0],
             "alibi_slopes": CALL["alibi_slopes"][0], "mask": CALL["mask"][:1]}  # fmt: skip
    stacked = {name: varied(name) for name in names}
    if not mapped:
        return check(stacked, small)
    several = {name: varied(name)[:, :1] for name in ("bias", "mask")}
    several["bias"] = several["bias"][..., :1, :]
    several |= {name: varied(name)[:, 0] for name in ("sinks", "alibi_slopes")}
    check(stacked | several, {})
    check(several, {name: CALL[name] for name in names})


def test_gradient_of_an_operand_shared_by_mapped_calls_is_a_sum():
    """The gradient of a shared bias is the sum over the mapped calls."""
    q, k, v = (varied(name) for name in ("query", "key", "value"))
    shared = {"bias": CALL["bias"][:1], "sinks": CALL["sinks"][0],
              "alibi_slopes": CALL["alibi_slopes"][0]}  # fmt: skip

    def total(shared, run):
        return run(lambda q, k, v: loss({"query": q, "key": k, "value": v}, shared,
                                        OUT_GRAD, LSE_GRAD))  # fmt: skip

    got = jax.grad(total)(shared, lambda f: jax.vmap(f)(q, k, v).sum())
    expected = jax.grad(total)(shared, lambda f: sum(f(*x) for x in zip(q, k, v, strict=True)))
    for name, x in got.items():
        np.testing.assert_allclose(x, expected[name], rtol=2e-5, atol=1e-5, err_msg=name)


def test_vmap_of_vmap_and_of_unbatched_calls():
    names = ("query", "key", "value", "sinks")
    nested = {name: np.stack([varied(name, 2), -varied(name, 2)]) for name in names}
    got = jax.vmap(jax.vmap(lambda x: attention(**x)))(nested)
    for i in np.ndindex(2, 2):
        expected = attention(**{name: x[i] for name, x in nested.items()})
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x[i], y, rtol=2e-5, atol=2e-6)
    # vmap over the batch axis itself.
    got = jax.vmap(lambda x: attention(**x))(CALL)
    for x, y in zip(got, attention(**CALL), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("mapped", ["key", "call", "both"])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_vmap_of_dropout_draws_the_masks_of_single_calls(mapped: str, impl: str):
    """Each mapped call drops the entries that it would drop alone: the same zeros."""
    stacked = {x: varied(x) for x in ("query", "key", "value")}
    stacked["value"] = np.abs(stacked["value"]) + 1
    keys = jax.random.split(jax.random.key(3, impl=impl), SIZE)
    keys = keys if mapped != "call" else keys[0]
    operands = stacked if mapped != "key" else {name: x[0] for name, x in stacked.items()}

    def both(operands, key):
        def dropped(operands):
            out = dot_product_attention(**operands, dropout_rate=0.8, dropout_key=key)
            return (out * OUT_GRAD).sum(), out

        return jax.grad(dropped, has_aux=True)(operands)

    axes = (None if mapped == "key" else 0, None if mapped == "call" else 0)
    got = jax.vmap(both, in_axes=axes)(operands, keys)
    for i in range(SIZE):
        alone = both(
            operands if mapped == "key" else {name: x[i] for name, x in operands.items()},
            keys if mapped == "call" else keys[i],
        )
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=2e-5, atol=2e-6)
    out = np.asarray(got[1])
    assert (out == 0).any() and not (out == 0).all()
    assert not np.array_equal(out[0] == 0, out[1] == 0) or mapped == "call"
    if mapped == "call":  # one key, one mask
        assert np.array_equal(out[0] == 0, out[1] == 0)


def test_vmap_of_row_maxima_and_dropout_masks():
    """Further results of mapped calls, with mapped and with shared segment ids."""
    stacked = {x: varied(x) for x in ("query", "key", "value")}
    ids = {x: CALL[x] for x in ("query_segment_ids", "key_value_segment_ids")}
    keys = jax.random.split(jax.random.key(3), SIZE)

    def both(operands, ids, key):
        options = {"dropout_rate": 0.5, "dropout_key": key, "max_segments": 2}
        results = dot_product_attention(**operands, **ids, **options, return_max_logits=True)
        return *results, dropout_mask(**operands, **ids, **options)

    for axes in ((0, None, 0), (None, None, 0), (0, None, None), (0, 0, 0)):
        given = (
            stacked if axes[0] == 0 else {name: x[0] for name, x in stacked.items()},
            {name: varied(name) for name in ids} if axes[1] == 0 else ids,
            keys if axes[2] == 0 else keys[0],
        )
        got = jax.vmap(both, in_axes=axes)(*given)
        for i in range(SIZE):
            alone = both(*(_at_index(x, i, axis) for x, axis in zip(given, axes, strict=True)))
            for x, y in zip(got, alone, strict=True):
                np.testing.assert_allclose(x[i], y, rtol=2e-5, atol=2e-6)


def _at_index(stacked: Any, i: int, axis: int | None) -> Any:
    return stacked if axis is None else jax.tree.map(lambda x: x[i], stacked)


def test_vmap_of_gradients_with_max_segments():
    names = ("query", "key", "value")
    ids = {x: varied(x) for x in ("query_segment_ids", "key_value_segment_ids")}

    def total(arrays, ids):
        out, maxima = dot_product_attention(
            **arrays, **ids, max_segments=2, is_causal=True, return_max_logits=True
        )
        return (out * OUT_GRAD).sum() + jnp.where(maxima == -jnp.inf, 0, maxima).sum()

    arrays = {x: varied(x) for x in names}
    got = jax.vmap(jax.grad(total))(arrays, ids)
    for i in range(SIZE):
        alone = jax.grad(total)(*({x: y[i] for x, y in z.items()} for z in (arrays, ids)))
        for name in names:
            np.testing.assert_allclose(got[name][i], alone[name], rtol=2e-5, atol=2e-6)
