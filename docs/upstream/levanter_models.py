"""Loss and gradients of Levanter's models with attn_dispatch, beside those with its own VANILLA.

Causal, with a window and on packed documents; jitted, on one device and on a mesh of data and
tensor parallelism. Run it with
PYTHONPATH=PATCHED_SOURCE:dispatch, where PATCHED_SOURCE holds levanter with levanter.patch.
"""

import contextlib
import dataclasses
import itertools

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
MAPPING = {"batch": "data", "heads": "model", "kv_head": "model", "mlp": "model"}
"""Names of Levanter's axes: those of its trainer's default, of the mesh below."""


def example(kind: str) -> LmExample:
    """A batch of rows; "packed": of three documents and padding each."""
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


def loss_and_gradients(config, backend: AttentionBackend, kind: str, mesh: Mesh | None):
    config = dataclasses.replace(config, attn_backend=backend)
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(hax.partitioning.set_mesh(mesh))
            stack.enter_context(hax.axis_mapping(MAPPING))

        def loss(model, batch):
            return model.compute_next_token_loss(batch).scalar()

        step = hax.named_jit(eqx.filter_value_and_grad(loss))

        model = config.model_type.init(VOCABULARY, config, key=jax.random.key(0))
        return jax.device_get(step(hax.shard(model), hax.shard(example(kind))))


def main() -> int:
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    calls = []
    own = levanter.layers.attention._attn_dispatch_attention

    def counted(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    levanter.layers.attention._attn_dispatch_attention = counted
    for name, kind, on in itertools.product(MODELS, ("causal", "window", "packed"), (None, mesh)):
        case = f"{name}, {kind}, {'one device' if on is None else 'mesh'}"
        expected = loss_and_gradients(MODELS[name], AttentionBackend.VANILLA, kind, on)
        calls.clear()
        got = loss_and_gradients(MODELS[name], AttentionBackend.ATTN_DISPATCH, kind, on)
        if not calls:
            raise AssertionError(f"{case}: expected calls of attn_dispatch")
        worst = max(
            np.abs(a - b).max() / np.abs(b).max()
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
            if np.any(b)
        )
        print(f"{case}: loss {got[0]:.6f}, worst relative difference {worst:.1e}")
        if not worst < 1e-4:
            raise AssertionError(f"{case}: expected at most 1e-4")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
