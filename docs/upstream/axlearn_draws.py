"""Random calls: AttnDispatchFlashAttention is compared with AXLearn's ReferenceMHA.

Compares values, and the gradients of query, key, value, dense bias and sinks, in float32. No rows
attend to nothing, because for these the two differ on purpose: uniform weights there, 0 here. Run
it with PYTHONPATH=PATCHED_SOURCE:dispatch, where PATCHED_SOURCE is AXLearn with axlearn.patch.
"""

# ruff: noqa: E402
import stand_ins
import trainers

stand_ins.install(trainers.AXLEARN.stand_ins)  # before AXLearn

import argparse
import collections
import random
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from axlearn.common import attention_bias as biases
from axlearn.common.flash_attention.attn_dispatch_attention import AttnDispatchFlashAttention
from axlearn.common.flash_attention.common import ReferenceMHA
from axlearn.common.kv_cache.kv_cache import KVCache

# Scores that are not scaled down are up to some 50, and float32 rounds them accordingly.
TOLERANCE, TOLERANCE_UNSCALED = 2e-5, 1e-4


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    features, failed, worst = collections.Counter(), 0, 0.0
    for number in range(given.seed, given.seed + given.count):
        drawn = Draw(number)
        try:
            worst = max(worst, difference(drawn))
        except Exception:  # the remaining calls are compared all the same
            failed += 1
            print(f"call {number}, {drawn.names}:\n{traceback.format_exc(limit=-3)}")
        features.update(drawn.names)
        if (done := number + 1 - given.seed) % 20 == 0:
            print(f"{done} calls, {failed} failed so far", flush=True)
    print(f"{given.count} calls, {failed} failed, largest difference {worst:.1e}")
    print(dict(sorted(features.items())))
    return int(failed > 0)


class Draw:
    """A random call: its arrays, the parts of its bias, and the names of its features."""

    def __init__(self, number: int):  # noqa: C901  a branch for each option
        dice, draw = random.Random(number), np.random.default_rng(number)
        self.cache = KVCache if dice.random() < 0.2 else None
        queries = dice.choice((1, 2, 7, 16, 33, 64, 75))
        keys = queries + dice.choice((0, 0, 1, 30))
        start = keys - queries if self.cache else 0
        batch, kv_heads, group = dice.choice((1, 2, 3)), dice.choice((1, 2)), dice.choice((1, 3, 4))
        heads, width = kv_heads * group, dice.choice((4, 8, 33, 64, 80, 144))
        self.scale = dice.choice((1.0, width**-0.5))
        positions = {
            "target_positions": start + jnp.arange(queries)[None],
            "source_positions": jnp.arange(keys)[None],
        }
        self.weight = np.ones((batch, queries, 1, 1), np.float32)
        self.overrides = None
        self.names = {
            f"heads/{group}",
            "queries/odd" if queries % 2 else "queries/even",
            f"dim/{width}",
        }
        parts, (left, right) = [], (dice.randrange(40), dice.randrange(40))

        def put(name: str, part) -> None:
            self.names.add(name)
            parts.append(part)

        kind = dice.choice(("causal", "sliding", "sides", "function", "full"))
        if kind == "causal" or (self.cache and kind == "full"):
            put("causal", biases.CausalAttentionBias(**positions))
        if kind == "sliding":
            mask = biases.sliding_window_causal_mask(left)
            put(
                kind, biases.SlidingWindowAttentionBias(mask, sliding_window_size=left, **positions)
            )
        if kind == "sides" or dice.random() < 0.1:
            mask = biases.left_right_window_mask(left, right)
            sides = biases.LeftRightWindowAttentionBias
            put("sides", sides(mask, left_context=left, right_context=right, **positions))
        if kind == "function":

            def prefix(t, s):
                return (s <= t) | (s < left)

            put(kind, biases.MaskFnAttentionBias(prefix, **positions))
        if queries == keys and not self.cache and dice.random() < 0.5:
            ids = np.sort(draw.integers(1, 5, (batch, queries)), axis=1)
            if dice.random() < 0.4:
                self.names.add("segments/bounded")
                self.overrides = {"attn_dispatch_max_segments": 4}
                ids[:, queries - queries // 4 :] = 0
                self.weight = (ids > 0).astype(np.float32)[:, :, None, None]
            put("segments", biases.SegmentIdAttentionBias(jnp.asarray(ids)))
        if dice.random() < 0.2:
            allowed = draw.random((dice.choice((1, batch)), 1, queries, keys)) < 0.7
            allowed |= np.eye(queries, keys, start, dtype=bool)
            put("mask", biases.BoolTensorAttentionBias(jnp.asarray(allowed)))
        self.parts = parts
        shapes: dict[str, tuple[int, ...]] = {
            "query": (batch, queries, heads, width),
            "key": (batch, keys, kv_heads, width),
            "value": (batch, keys, kv_heads, width),
        }
        if dice.random() < 0.3:
            shapes["dense"] = (dice.choice((1, batch)), dice.choice((1, heads)), queries, keys)
        if dice.random() < 0.3:
            shapes["logit_sink"] = (heads,)
        self.names |= shapes.keys() - {"query", "key", "value"}
        self.names |= {"cache"} if self.cache else set()
        self.arrays = {x: jnp.asarray(draw.normal(size=y), jnp.float32) for x, y in shapes.items()}

    def batch(self, arrays) -> dict:
        rest = dict(arrays)
        dense = rest.pop("dense", None)
        parts = [*self.parts, *([] if dense is None else [biases.TensorAttentionBias(dense)])]
        return {"logit_sink": None, **rest, "bias": biases.CompositeAttentionBias(parts)}


def difference(drawn: Draw) -> float:
    """The largest difference in values and gradients; raises an error if it is too large."""
    found = []
    for kind in (ReferenceMHA, AttnDispatchFlashAttention):
        config = kind.default_config()
        config.set(softmax_scale=drawn.scale, backend_overrides=drawn.overrides)
        attention = config.instantiate()

        def loss(arrays, attention=attention):
            batch = drawn.batch(arrays)
            if not attention.is_supported(batch, kv_cache_type=drawn.cache):
                raise AssertionError(f"{attention.name()} does not support the call")
            out = attention(batch) * drawn.weight
            return jnp.sum(jnp.sin(3 * out)), out

        grads, out = jax.jit(jax.grad(loss, has_aux=True))(drawn.arrays)
        found.append({"out": out, **grads})
    expected, got = found
    differences = {}
    for name, x in expected.items():
        size = max(1.0, float(jnp.abs(x).max()))
        differences[name] = float(jnp.abs(x - got[name]).max()) / size
    most = TOLERANCE_UNSCALED if drawn.scale == 1 else TOLERANCE
    if not all(x <= most for x in differences.values()):  # NaN fails too
        raise AssertionError(f"expected differences up to {most}, got {differences}")
    return max(differences.values())


if __name__ == "__main__":
    sys.exit(main())
