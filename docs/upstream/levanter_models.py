"""Compares loss and gradients of Levanter's models with attn_dispatch and with VANILLA attention.

The calls are causal, with a window and on packed documents; jitted, on one device and on a mesh
with data and tensor parallelism. They are in float32 on CPUs, and in bfloat16 on GPUs, where
differences may be twice those between VANILLA in bfloat16 and in float32. Run it with
PYTHONPATH=PATCHED_SOURCE:dispatch, where PATCHED_SOURCE holds levanter with levanter.patch.
ATTN_STAND_INS names packages to replace by stand-ins, such as those for data and logging.
"""

import stand_ins  # noqa: F401  before Levanter

# isort: split
import argparse
import contextlib
import dataclasses
import itertools
import json
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.layers.attention
import numpy as np
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.gemma import Gemma2Config, Gemma3Config
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.models.mistral import MistralConfig
from levanter.models.qwen import Qwen3Config

import attn_dispatch
from attn_dispatch_tools.reports.environment import cuda_devices, environment

BATCH, LENGTH, VOCABULARY = hax.Axis("batch", 4), 64, hax.Axis("vocab", 128)
SIZES = {"max_seq_len": LENGTH, "hidden_dim": 64, "num_layers": 2, "num_heads": 4}
GROUPED = {**SIZES, "intermediate_dim": 96, "num_kv_heads": 2}
MODELS = {
    "gpt2": Gpt2Config(**SIZES, attn_pdrop=0.0, embed_pdrop=0.0, resid_pdrop=0.0),
    "llama": LlamaConfig(**GROUPED),
    "mistral": MistralConfig(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=32),
    "gemma2": Gemma2Config(**GROUPED, head_dim=32),
    "gemma3": Gemma3Config(**GROUPED, head_dim=32),
}
KINDS = ("causal", "window", "packed")
MAPPING = {"batch": "data", "heads": "model", "kv_head": "model", "mlp": "model"}
"""The mesh axis of each of Levanter's axes, as in its trainer's default; the mesh is below."""


def example(kind: str) -> LmExample:
    """A batch of rows. With "packed" each row has three documents and padding."""
    random = np.random.default_rng(0)
    position = hax.Axis("position", LENGTH)
    ends = np.sort(random.choice(np.arange(1, LENGTH), (BATCH.size, 3)), -1)
    ids = (np.arange(LENGTH)[None, :, None] >= ends[:, None, :]).sum(-1)
    ids = np.where(ids == 3, -1, ids) if kind == "packed" else 0 * ids  # -1 is Levanter's padding
    segments = hax.named(jnp.asarray(ids, jnp.int32), (BATCH, position))
    tokens = hax.named(
        jnp.asarray(random.integers(0, VOCABULARY.size, ids.shape), jnp.int32), (BATCH, position)
    )
    mask = AttentionMask.causal(sliding_window=16 if kind == "window" else None)
    if kind == "packed":
        mask = mask.with_segment_ids(segments, segments)
    return LmExample(
        tokens=tokens,
        loss_weight=hax.named(jnp.asarray(ids >= 0, jnp.float32), (BATCH, position)),
        attn_mask=mask,
    )


def loss_and_gradients(config, backend: AttentionBackend, kind: str, mesh: Mesh | None, dtype):
    """The loss and all gradients as NumPy arrays, in float32."""
    config = dataclasses.replace(config, attn_backend=backend)

    def loss(model, batch):
        return model.compute_next_token_loss(batch).scalar()

    step = hax.named_jit(eqx.filter_value_and_grad(loss))
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(hax.partitioning.set_mesh(mesh))
            stack.enter_context(hax.axis_mapping(MAPPING))
        model = config.model_type.init(VOCABULARY, config, key=jax.random.key(0))
        parameters, rest = eqx.partition(model, eqx.is_inexact_array)
        model = eqx.combine(jax.tree.map(lambda x: x.astype(dtype), parameters), rest)
        results = jax.device_get(step(hax.shard(model), hax.shard(example(kind))))
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(results)]


def worst_difference(results: list, expected: list) -> float:
    """The largest difference in any array, as a share of the largest number in it."""
    pairs = zip(results, expected, strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs if np.any(b))


def count_calls() -> list[int]:
    """A list that grows by an element with each call of attn_dispatch that Levanter traces."""
    calls = []
    own = levanter.layers.attention._attn_dispatch_attention

    def counted(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    levanter.layers.attention._attn_dispatch_attention = counted
    return calls


def meshes() -> dict[str, Mesh | None]:
    devices = jax.devices()
    found: dict[str, Mesh | None] = {"one device": None}
    if len(devices) > 1:
        grid = np.array(devices).reshape(-1, 2)
        found[f"mesh of {len(devices)}"] = Mesh(grid, ("data", "model"), (AxisType.Auto,) * 2)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the differences to this JSON file")
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    dtype = jnp.bfloat16 if cuda_devices() else jnp.float32
    calls = count_calls()
    rows = []
    for name, kind, (place, mesh) in itertools.product(MODELS, KINDS, meshes().items()):
        expected = loss_and_gradients(MODELS[name], AttentionBackend.VANILLA, kind, mesh, "float32")
        calls.clear()
        with attn_dispatch.fallback("error"):
            got = loss_and_gradients(
                MODELS[name], AttentionBackend.ATTN_DISPATCH, kind, mesh, dtype
            )
        if not calls:
            raise AssertionError(f"{name}, {kind}, {place}: expected calls of attn_dispatch")
        row = {"model": name, "mask": kind, "on": place, "ours": worst_difference(got, expected)}
        limit = 1e-4
        if dtype == jnp.bfloat16:
            vanilla = loss_and_gradients(MODELS[name], AttentionBackend.VANILLA, kind, mesh, dtype)
            row["vanilla"] = worst_difference(vanilla, expected)
            limit = 2 * row["vanilla"]
        row["passed"] = row["ours"] <= limit
        print(row, flush=True)
        rows.append(row)
    if given.out:
        report = {"environment": environment(), "dtype": np.dtype(dtype).name, "rows": rows}
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
