"""Forward-mode derivatives under JAX's transforms, on stand-ins for fa4's kernel of them.

Every program is compared with formulas in float64, which JAX differentiates in the same way. Shapes
and numbers are drawn by the names of program and mask. Padding of packed calls holds NaN, also in
tangents. The text of each program says how many kernels of tangents are in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain_program, fallback, target
from attn_dispatch.fa4.compiled import TANGENT_TARGET
from tests.support.fa4_emulated import needs_computing_kernels
from tests.support.h100_of_stand_ins import h100

pytestmark = needs_computing_kernels

Attention = Callable[..., tuple[jax.Array, jax.Array]]
Three = tuple[jax.Array, ...]


@pytest.fixture(autouse=True)
def _an_h100_of_stand_ins(monkeypatch):
    monkeypatch.setenv("ATTN_DISPATCH_POISON", "1")
    with h100(monkeypatch):
        yield


@dataclass(frozen=True)
class Mask:
    """A mask as arguments, and as pairs [T, S] of a call of so many rows and keys."""

    arguments: dict[str, Any]
    seen: np.ndarray
    padding: int = 0
    """The number of last rows and keys, which are in no document."""

    def spoiled(self, x: np.ndarray, with_number: float) -> np.ndarray:
        x = x.copy()
        x[:, x.shape[1] - self.padding :] = with_number
        return x


def band(t: int, s: int, left: int | None, right: int | None, offset: int = 0) -> np.ndarray:
    distance = np.arange(s) - np.arange(t)[:, None] - offset
    seen = np.ones((t, s), bool)
    if left is not None:
        seen &= distance >= -left
    return seen & (distance <= right) if right is not None else seen


def masks(rng: np.random.RandomState) -> dict[str, Mask]:
    t = rng.randint(20, 100)
    s, left, right = t + rng.randint(1, 60), rng.randint(1, 30), rng.randint(1, 30)
    ids = np.sort(rng.randint(1, 5, t))[None]
    ids[:, t - (padding := rng.randint(1, 9)) :] = 0
    within = (ids[0, :, None] == ids[0]) & (ids[0] > 0)
    documents = {"query_segment_ids": ids, "key_value_segment_ids": ids, "max_segments": 4}
    causal = {"is_causal": True}
    return {
        "full": Mask({}, band(t, s, None, None)),
        "causal": Mask(causal, band(t, s, None, 0)),
        "bottom right": Mask(
            causal | {"causal_alignment": "bottom_right"}, band(t, s, None, 0, s - t)
        ),
        "causal window": Mask({"local_window_size": (left, 0)}, band(t, t, left, 0)),
        "window": Mask({"local_window_size": (left, right)}, band(t, t, left, right)),
        "packed": Mask(documents, within, padding),
        "packed, causal": Mask(documents | causal, within & band(t, t, None, 0), padding),
        "packed, a window": Mask(
            documents | {"local_window_size": (left, right)}, within & band(t, t, left, right),
            padding,
        ),
    }  # fmt: skip


def formula(q: jax.Array, k: jax.Array, v: jax.Array, *, seen: np.ndarray) -> Three:
    """out and lse [B, T, N]; 0 and -inf of rows that see nothing."""
    b, t, n, h = q.shape
    groups = q.reshape(b, t, k.shape[2], -1, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", groups, k) * h**-0.5
    attends = np.any(seen, axis=-1)
    scores = jnp.where(seen, scores, -jnp.inf)
    lse = jax.nn.logsumexp(jnp.where(attends[:, None], scores, 0), axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    lse = jnp.where(attends, lse, -jnp.inf).reshape(b, n, t).swapaxes(1, 2)
    return out.reshape(b, t, n, -1), lse


def finite(out: jax.Array, lse: jax.Array) -> Three:
    """out and lse without infinities, of which a loss would be infinite as well."""
    return out, jnp.where(lse == -jnp.inf, 0, lse)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def goal(results: Three) -> jax.Array:
    """A loss of out and lse."""
    out, lse = (wide(x) for x in finite(*results))
    return (jnp.sin(out) * out).sum() + (jnp.sin(lse) * lse).sum()


def jvp(f: Attention, x: Three, t: Three) -> Any:
    return jax.jvp(f, x, t)


def linearized(f: Attention, x: Three, t: Three) -> Any:
    results, linear = jax.linearize(f, *x)
    moved = linear(*t)
    return results, moved, jax.linear_transpose(linear, *t)((t[0], jnp.zeros_like(moved[1])))


def scaled(f: Attention, x: Three, s: jax.Array) -> Three:
    return f(*(y * s[i].astype(y.dtype) for i, y in enumerate(x)))


def jacobian(f: Attention, x: Three, t: Three) -> Any:
    """By jax.jacfwd, which maps tangents alone."""
    found = jax.jacfwd(partial(scaled, f, x))(jnp.ones(3, x[0].dtype))
    return jax.tree.map(wide, found)


def mapped(f: Attention, x: Three, t: Three) -> Any:
    return jax.vmap(lambda x, t: jax.jvp(f, x, t))(*_stacked(x, t))


def mapped_twice(f: Attention, x: Three, t: Three) -> Any:
    """Two maps, the inner one of the keys' tangents alone."""

    def one(x: Three, t: Three) -> Any:
        return jax.vmap(lambda tk: jax.jvp(f, x, (t[0], tk, t[2])), out_axes=1)(
            jnp.stack([t[1], x[1]])
        )

    return jax.vmap(one)(*_stacked(x, t))


def _stacked(x: Three, t: Three) -> tuple[Three, Three]:
    both = [jnp.stack([y, z]) for y, z in zip(x, t, strict=True)]
    return tuple(both), tuple(y[::-1] for y in both)


def scanned(f: Attention, x: Three, t: Three) -> Any:
    """Three layers, each of which reads the last one's out as its query."""

    def layers(*x: jax.Array) -> Any:
        def layer(query: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            out, lse = f(query, *x[1:])
            return out.astype(query.dtype), lse

        return jax.lax.scan(layer, x[0], None, length=3)

    return jax.jvp(layers, x, t)


def of_gradient(f: Attention, x: Three, t: Three) -> Any:
    """Forward over reverse."""
    return jax.jvp(jax.grad(lambda x: goal(f(*x))), (x,), (t,))


def through_tangent(f: Attention, x: Three, t: Three) -> Any:
    """Reverse over forward: the gradients of a loss of tangents, by operands and tangents."""

    def loss(x: Three, t: Three) -> jax.Array:
        results, moved = jax.jvp(f, x, t)
        return goal(moved) + goal(results)

    return jax.grad(loss, argnums=(0, 1))(x, t)


def through_mapped_tangent(f: Attention, x: Three, t: Three) -> Any:
    """The same, of tangents that are mapped, by the tangents of all."""

    def loss(t: Three) -> jax.Array:
        one = lambda q: goal(jax.jvp(f, x, (q, *t[1:]))[1])  # noqa: E731
        return jax.vmap(one)(jnp.stack([t[0], x[0]])).sum()

    return jax.grad(loss)(t)


def mean_flow(f: Attention, x: Three, t: Three) -> Any:
    """The loss and gradients where a tangent is a part of the goal."""

    def loss(x: Three) -> jax.Array:
        (out, _), (moved, _) = jax.jvp(f, x, t)
        return ((wide(out) + 0.5 * jax.lax.stop_gradient(wide(moved))) ** 2).sum()

    return jax.value_and_grad(loss)(x)


def rematerialized(f: Attention, x: Three, t: Three) -> Any:
    return mean_flow(jax.checkpoint(f), x, t)


PROGRAMS: dict[str, tuple[Callable[..., Any], int]] = {
    "jvp": (jvp, 1),
    "linearize": (linearized, 1),
    "jacfwd": (jacobian, 1),
    "vmap": (mapped, 1),
    "vmap of vmap": (mapped_twice, 1),
    "scan": (scanned, 1),
    "jvp of grad": (of_gradient, 1),
    "grad of jvp": (through_tangent, 1),
    "grad of vmap of jvp": (through_mapped_tangent, 1),
    "MeanFlow": (mean_flow, 1),
    "remat": (rematerialized, 1),
}
"""The programs, and the kernels of tangents in them. Derivatives of second order are formulas
beside a kernel, which computes the tangents of out and lse."""

ALL_MASKS = tuple(masks(np.random.RandomState(0)))
SOME_MASKS = ("causal window", "packed, causal")


@pytest.mark.parametrize(
    ("name", "mask_name"),
    [
        *(("jvp", x) for x in ALL_MASKS),
        *((x, y) for x in PROGRAMS if x != "jvp" for y in SOME_MASKS),
    ],
)
def test_values_under_transforms(name: str, mask_name: str):
    program, kernels = PROGRAMS[name]
    rng = np.random.RandomState(zlib.crc32(f"{name} {mask_name}".encode()))
    mask = masks(rng)[mask_name]
    shape = drawn_shape(rng, mask, has_two_widths=name == "jvp")
    x, t = ([rng.standard_normal(y) for y in shape] for _ in range(2))

    def arrays(number: float, dtype: Any) -> tuple[Three, Three]:
        values, tangents = (
            tuple(jnp.asarray(mask.spoiled(z, number)).astype(dtype) for z in y) for y in (x, t)
        )
        return values, tangents

    ours = partial(
        dot_product_attention, **mask.arguments, return_lse=True, implementation=("fa4", "xla")
    )
    jitted, given = jax.jit(partial(program, ours)), arrays(np.nan, jnp.bfloat16)
    assert jitted.lower(*given).as_text().count(f"@{TANGENT_TARGET}") == kernels
    got = jitted(*given)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: wide(x).astype(jnp.float64), arrays(0, jnp.bfloat16))
        expected = jax.jit(partial(program, partial(formula, seen=mask.seen)))(*exact)
    for ours_leaf, exact_leaf in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (ours_leaf, exact_leaf))
        is_infinite = np.isinf(b)
        assert (a[is_infinite] == b[is_infinite]).all()
        a, b = a[~is_infinite], b[~is_infinite]
        assert np.abs(a - b).max() <= 0.05 * max(np.abs(b).max(), 0.1)


def drawn_shape(
    rng: np.random.RandomState, mask: Mask, *, has_two_widths: bool
) -> list[tuple[int, ...]]:
    """The shapes of query, key and value. In some programs, out is a query."""
    t, s = mask.seen.shape
    kv_heads, groups = rng.randint(1, 3, 2)
    # Segment ids are those of one batch row.
    batch = 1 if mask.padding else rng.randint(1, 3)
    width, width_v = rng.choice([16, 40, 64], 2)
    width_v = width_v if has_two_widths else width
    key = (batch, s, kv_heads)
    return [(batch, t, kv_heads * groups, width), (*key, width), (*key, width_v)]


REASONS = {
    "jvp of grad": "none for a derivative of a derivative",
    "grad of jvp": "none for a derivative of a derivative",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_program_says_what_runs_the_tangents(name: str):
    """A program whose tangents are formulas says why; in the others the kernel is named."""
    arrays = (jnp.ones((1, 20, 2, 64), jnp.bfloat16),) * 3
    ours = partial(dot_product_attention, return_lse=True, implementation=("fa4", "xla"))
    program = partial(PROGRAMS[name][0], ours)
    text = str(explain_program(program, arrays, arrays, target="sm90"))
    assert REASONS.get(name, "kernel of the derivative") in " ".join(text.split())


@pytest.mark.parametrize("empty", ["query", "key"])
def test_an_empty_call_has_no_fallback(empty: str):
    sizes = {
        "query": (1, 0 if empty == "query" else 8, 4, 64),
        "key": (1, 0 if empty == "key" else 8, 4, 64),
    }
    q, k = (jnp.zeros(sizes[x], jnp.bfloat16) for x in ("query", "key"))
    program = jax.jit(lambda q, k: jax.jvp(dot_product_attention, (q, k, k), (q, k, k)))
    with target("h100"), fallback("error"):
        program.trace(q, k).lower(lowering_platforms=("cuda",))
