"""Nested vmaps over any axes of any operands equal a Python loop, results and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention
from attn_dispatch_tools.verify.compiling import COMPILE_QUICKLY
from tests.support.extent import number_of_draws

T, S, N, K, H = 4, 5, 4, 2, 4
FLOATS = ("query", "key", "value", "bias", "sinks", "alibi_slopes")
DRAWS = number_of_draws(16, most=300)

jit = partial(jax.jit, compiler_options=COMPILE_QUICKLY)

NamedArrays = dict[str, Any]


@dataclass(frozen=True)
class Draw:
    sizes: tuple[int, ...]
    """Sizes of the mapped axes, the outermost first."""
    axes: dict[str, tuple[int | None, ...]]
    """The mapped axis of each operand for each vmap; None if it is shared."""
    arrays: NamedArrays
    options: dict[str, Any]

    def part(self, name: str, x: Any, index: tuple[int, ...]) -> Any:
        """A view of the part of x, an array like operand `name`, that the call at `index` uses."""
        for axis, i in zip(self.axes[name], index, strict=True):
            if axis is not None:
                x = (np if isinstance(x, np.ndarray) else jnp).moveaxis(x, axis, 0)[i]
        return x

    def mapped(self, function: Any) -> Any:
        """`function`, which takes operands by name, under all the vmaps."""
        for level in reversed(range(len(self.sizes))):
            function = jax.vmap(function, ({x: axes[level] for x, axes in self.axes.items()},))
        return function

    def attention(self, operands: NamedArrays) -> tuple[jax.Array, jax.Array]:
        return dot_product_attention(**operands, **self.options, return_lse=True)

    def loss(self, floats: NamedArrays, rest: NamedArrays) -> tuple[jax.Array, Any]:
        out, lse = self.attention(floats | rest)
        weighted = [jnp.cos(jnp.arange(x.size)) * x.ravel() for x in (out, _finite(lse))]
        return jnp.concatenate(weighted).sum(), (out, lse)

    def gradients(self, operands: NamedArrays) -> Any:
        """The gradients of one call, and its results."""
        return jax.grad(self.loss, has_aux=True)(*_split(operands))

    def gradients_of_all(self, operands: NamedArrays) -> NamedArrays:
        """The gradients of the sum over all mapped calls."""

        def total(floats: NamedArrays, rest: NamedArrays) -> jax.Array:
            return self.mapped(lambda x: self.loss(*_split(x))[0])(floats | rest).sum()

        return jax.grad(total)(*_split(operands))


def _split(operands: NamedArrays) -> tuple[NamedArrays, NamedArrays]:
    floats = {name: x for name, x in operands.items() if name in FLOATS}
    return floats, {name: x for name, x in operands.items() if name not in floats}


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(x == -jnp.inf, 0, x)


def drawn(seed: int) -> Draw:
    rng = np.random.default_rng(seed)
    batch = ((), (2,), (2, 1), (3, 2))[rng.integers(4)]
    sizes = tuple(rng.integers(1, 4, rng.integers(1, 4)).tolist())
    shapes = {
        "query": (*batch, T, N, H), "key": (*batch, S, K, H), "value": (*batch, S, K, H),
        "bias": _some_ones(rng, (*batch, N, T, S)), "mask": _some_ones(rng, (*batch, N, T, S)),
        "sinks": (*(batch if rng.random() < 0.5 else ()), N),
        "alibi_slopes": (*(batch if rng.random() < 0.5 else ()), N),
        "query_seq_lengths": batch, "key_value_seq_lengths": batch,
        "query_segment_ids": (*batch, T), "key_value_segment_ids": (*batch, S), "dropout_key": (),
    }  # fmt: skip
    names = [x for x in shapes if x in ("query", "key", "value") or rng.random() < 0.4]
    if "query_segment_ids" in names or "key_value_segment_ids" in names:
        names = list(dict.fromkeys([*names, "query_segment_ids", "key_value_segment_ids"]))
    axes: dict[str, list[int | None]] = {name: [] for name in names}
    shapes = {name: shapes[name] for name in names}
    for size in reversed(sizes):
        mapped = [x for x in names if rng.random() < 0.5] or [names[rng.integers(len(names))]]
        for name, shape in shapes.items():
            axis = int(rng.integers(len(shape) + 1)) if name in mapped else None
            axes[name].insert(0, axis)
            if axis is not None:
                shapes[name] = (*shape[:axis], size, *shape[axis:])
    options: dict[str, Any] = {"is_causal": bool(rng.random() < 0.5)}
    if "dropout_key" in names:
        options["dropout_rate"] = 0.4
    arrays = {name: _array(rng, name, shape) for name, shape in shapes.items()}
    return Draw(sizes, {x: tuple(y) for x, y in axes.items()}, arrays, options)


def _some_ones(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if rng.random() < 0.4 else size for size in shape)


def _array(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    if name == "dropout_key":
        return jax.random.split(jax.random.key(rng.integers(100)), shape)
    if name.endswith("lengths"):
        return rng.integers(1, T + 1, shape)
    if name.endswith("ids"):
        return rng.integers(0, 3, shape)
    if name == "mask":
        return rng.random(shape) < 0.8
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_drawn_vmaps_agree_with_a_loop(seed: int):
    draw = drawn(seed)
    got_gradients, got = jit(draw.mapped(draw.gradients))(draw.arrays)
    total = jit(draw.gradients_of_all)(draw.arrays)
    expected_total = {name: np.zeros(x.shape, np.float64) for name, x in total.items()}
    single = jit(draw.gradients)
    for index in np.ndindex(*draw.sizes):
        gradients, results = single({x: draw.part(x, y, index) for x, y in draw.arrays.items()})
        for name, x in gradients.items():
            _assert_close(got_gradients[name][index], x, name)
            view = draw.part(name, expected_total[name], index)
            view += np.asarray(x)  # in place; += of a JAX array would only rebind the name
        for x, y in zip(got, results, strict=True):
            _assert_close(x[index], y, "results")
    for name, x in expected_total.items():
        _assert_close(total[name], x, f"{name}, in total")


def _assert_close(got: Any, expected: Any, name: str) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-5, err_msg=name)
