"""score_mods and mask_mods drawn at random, and attention with them written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Sizes:
    b: int
    t: int
    s: int
    n: int
    k: int
    h: int


@dataclass(frozen=True)
class DrawnMod:
    """A call with a score_mod, and perhaps a mask_mod."""

    seed: int
    sizes: Sizes
    dtype: str
    is_causal: bool
    score_mod: Callable[..., Any]
    mask_mod: Callable[..., Any] | None
    arrays: tuple[np.ndarray, ...]
    """What the score_mod is given: [N], [T], [S] and [B] float32."""
    mask_arrays: tuple[np.ndarray, ...]
    """[B] int32."""
    lines: tuple[str, ...]
    """The score_mod's operations."""

    def operands(self) -> dict[str, np.ndarray]:
        """query, key, value and the gradient of the output, rounded to the dtype, as float32."""
        rng, z = np.random.default_rng(self.seed), self.sizes
        shapes = {
            "query": (z.b, z.t, z.n, z.h),
            "key": (z.b, z.s, z.k, z.h),
            "value": (z.b, z.s, z.k, z.h),
            "out_grad": (z.b, z.t, z.n, z.h),
        }
        return {
            name: rng.standard_normal(shape).astype(jnp.dtype(self.dtype)).astype(np.float32)
            for name, shape in shapes.items()
        }

    def with_arrays(self, arrays: tuple[Any, ...]) -> DrawnMod:
        """The same call of other arrays."""
        return replace(self, arrays=arrays)

    def written_out(self, q: Any, k: Any, v: Any, narrow: Any = None) -> Any:
        """The output in q's dtype; what goes into the second product is rounded to `narrow`."""
        z = self.sizes
        b, n, t, s = (jnp.asarray(x) for x in np.ogrid[: z.b, : z.n, : z.t, : z.s])
        group = z.n // z.k
        scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(z.b, z.t, z.k, group, z.h), k)
        scores = scores.reshape(z.b, z.n, z.t, z.s) * z.h**-0.5
        may = jnp.ones((z.b, z.n, z.t, z.s), bool)
        if self.is_causal:
            may &= s <= t
        if self.mask_mod is not None:
            may &= self.mask_mod(b, n, t, s, *(jnp.asarray(x) for x in self.mask_arrays))
        # NaN where a pair may not attend would reach the gradients here.
        arrays = (jnp.asarray(x, scores.dtype) for x in self.arrays)
        scores = self.score_mod(
            jnp.where(may, scores, 0), b, n, jnp.where(may, t, 0), jnp.where(may, s, 0), *arrays
        )
        scores = jnp.where(may, scores, -jnp.inf)
        top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        weights = jnp.where(may, jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top)), 0)
        total = weights.sum(-1, keepdims=True)
        p = weights / jnp.where(total == 0, 1, total)
        if narrow is not None:
            p = p.astype(narrow).astype(p.dtype)
        out = jnp.einsum("bkgts,bskh->btkgh", p.reshape(z.b, z.k, group, z.t, z.s), v)
        return out.reshape(q.shape)


def drawn(seed: int) -> DrawnMod:
    """The same seed draws the same call everywhere."""
    rng = np.random.default_rng([seed, 11])
    k = int(rng.choice([1, 2]))
    sizes = Sizes(
        b=int(rng.choice([1, 2, 3])),
        t=int(rng.choice([2, 33, 64, 100, 128, 200, 256])),
        s=int(rng.choice([8, 64, 77, 128, 160, 256, 300])),
        n=k * int(rng.choice([1, 2, 4])),
        k=k,
        h=int(rng.choice([32, 64, 72, 128])),
    )
    arrays = tuple(
        rng.standard_normal(x).astype(np.float32) for x in (sizes.n, sizes.t, sizes.s, sizes.b)
    )
    operations, lines = _operations(rng)

    def score_mod(score, b, n, t, s, of_n, of_t, of_s, of_b):
        values = [score]
        read = {"b": (of_b, b), "n": (of_n, n), "t": (of_t, t), "s": (of_s, s)}
        for operation in operations:
            values.append(operation(values, t, s, read).astype(score.dtype))
        return 0.5 * values[-1] + score

    mask_mod, mask_arrays = _mask(rng, sizes)
    return DrawnMod(
        seed=seed,
        sizes=sizes,
        dtype=str(rng.choice(["bfloat16", "float16"])),
        is_causal=bool(rng.random() < 0.4),
        score_mod=score_mod,
        mask_mod=mask_mod,
        arrays=arrays,
        mask_arrays=mask_arrays,
        lines=tuple(lines),
    )


def _operations(rng: np.random.Generator) -> tuple[list[Callable[..., Any]], list[str]]:
    """3 to 20 of them; each keeps what it makes of values of moderate size of moderate size."""
    operations, lines = [], []
    # An array for each query row is a row vector, and a backward pass takes few of them.
    readable = ["n", "s", "b", *(["t"] if rng.random() < 0.3 else [])]
    for i in range(int(rng.integers(3, 21))):
        x, y = (int(v) for v in rng.integers(0, i + 1, 2))
        c = float(np.float32(rng.uniform(0.25, 2)))
        w = int(rng.integers(1, 60))
        name = str(rng.choice(readable))
        made: dict[str, Callable[..., Any]] = {
            f"{c} * tanh(v{x} / {c})": lambda v, t, s, r, x=x, c=c: c * jnp.tanh(v[x] / c),
            f"v{x} + {c}": lambda v, t, s, r, x=x, c=c: v[x] + c,
            f"{c} - v{x}": lambda v, t, s, r, x=x, c=c: c - v[x],
            f"(v{x} + v{y}) / 2": lambda v, t, s, r, x=x, y=y: (v[x] + v[y]) / 2,
            f"v{x} - tanh(v{y})": lambda v, t, s, r, x=x, y=y: v[x] - jnp.tanh(v[y]),
            f"sin(v{x}) * v{y}": lambda v, t, s, r, x=x, y=y: jnp.sin(v[x]) * v[y],
            f"v{x} / (1 + v{y}²)": lambda v, t, s, r, x=x, y=y: v[x] / (1 + v[y] * v[y]),
            f"{c} / (1 + v{x}²)": lambda v, t, s, r, x=x, c=c: c / (1 + jnp.square(v[x])),
            f"sigmoid(v{x})": lambda v, t, s, r, x=x: jax.nn.sigmoid(v[x]),
            f"exp(-v{x}²)": lambda v, t, s, r, x=x: jnp.exp(-(v[x] ** 2)),
            f"log1p(v{x}²)": lambda v, t, s, r, x=x: jnp.log1p(v[x] * v[x]),
            f"v{x} - |t - s| / {w}": lambda v, t, s, r, x=x, w=w: v[x] - jnp.abs(t - s) / w,
            f"v{x} * {name}[{name}]": lambda v, t, s, r, x=x, k=name: v[x] * r[k][0][r[k][1]],
            f"v{x} + {name}[{name}] * tanh(t - s)": lambda v, t, s, r, x=x, k=name: (
                v[x] + r[k][0][r[k][1]] * jnp.tanh((t - s) / 16)
            ),
            f"where(t - s < {w}, v{x}, v{y})": lambda v, t, s, r, x=x, y=y, w=w: jnp.where(
                t - s < w, v[x], v[y]
            ),
            f"where((s >= {w}) | (t == s), v{x}, {c})": lambda v, t, s, r, x=x, c=c, w=w: jnp.where(
                (s >= w) | (t == s), v[x], c
            ),
            f"v{x} - log1p(t - s) where s <= t": lambda v, t, s, r, x=x: (
                v[x] - jnp.where(s <= t, jnp.log(1.0 + jnp.maximum(t - s, 0)), 0.0)
            ),
        }
        line = str(rng.choice(list(made)))
        operations.append(made[line])
        lines.append(f"v{i + 1} = {line}")
    return operations, lines


def _mask(
    rng: np.random.Generator, sizes: Sizes
) -> tuple[Callable[..., Any] | None, tuple[np.ndarray, ...]]:
    lengths = rng.integers(1, sizes.s + 1, sizes.b).astype(np.int32)
    w = int(rng.integers(1, 100))
    masks: list[Callable[..., Any]] = [
        lambda b, n, t, s, x: (s <= t) | (s < x[b]),
        lambda b, n, t, s, x: (s < x[b]) & (t - s < w),
        lambda b, n, t, s, x: ~((t - s > w) | (s > x[b])),
        lambda b, n, t, s, x: (s == 0) | (jnp.abs(t - s) <= w + n),
    ]
    number = int(rng.integers(0, 2 * len(masks)))
    return (masks[number], (lengths,)) if number < len(masks) else (None, ())
