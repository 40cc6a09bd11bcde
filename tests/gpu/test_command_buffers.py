"""CUDA graphs of whole decoder layers, which contain our custom calls and the other kernels."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from tests.support.gpu_programs import in_new_process

LAYERS, BATCH, LENGTH, WIDTH = 3, 2, 512, 512
HEADS, KV_HEADS, DIM = 8, 2, 64
_QKV = (HEADS + 2 * KV_HEADS) * DIM
_WITHOUT_GRAPHS = "--xla_gpu_enable_command_buffer="
_SAME_KERNELS = "--xla_gpu_autotune_level=0 --xla_gpu_exclude_nondeterministic_ops=true"
"""Flags that make XLA choose the same kernels in every process."""
_OTHERS = ("kKernel", "kGemm", "kCublasLt", "kCustomKernel", "kCuDnn")
"""Beginnings of the kinds of thunk that run a layer's other kernels."""


def weights() -> dict[str, jax.Array]:
    """The weights of all layers, stacked along the first axis."""
    shapes = {
        "norm": (WIDTH,),
        "qkv": (WIDTH, _QKV),
        "out": (HEADS * DIM, WIDTH),
        "up": (WIDTH, 2 * WIDTH),
        "down": (2 * WIDTH, WIDTH),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, (LAYERS, *shape), jnp.bfloat16) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def tokens() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH), jnp.bfloat16)


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)


def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """One layer: norm, QKV projection, attention, output projection, MLP."""
    qkv = (normalized(x, w["norm"]) @ w["qkv"]).reshape(BATCH, LENGTH, -1, DIM)
    q, k, v = jnp.split(qkv, (HEADS, HEADS + KV_HEADS), axis=2)
    mixed = attn_dispatch.dot_product_attention(
        q, k, v, is_causal=True, implementation="cudnn", deterministic_backward=True
    )
    x = x + mixed.reshape(BATCH, LENGTH, -1) @ w["out"]
    return x + jax.nn.gelu(normalized(x, w["norm"]) @ w["up"]) @ w["down"]


@jax.jit
def decoder(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    for index in range(LAYERS):
        x = layer(x, jax.tree.map(lambda y, index=index: y[index], w))
    return x


def _loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    def body(x, w):
        return layer(x, w), None

    found, _ = jax.lax.scan(jax.checkpoint(body), x, w)
    return (found.astype(jnp.float32) ** 2).mean()


@jax.jit
def training(x: jax.Array, w: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """One step of gradient descent, with the layers in a scan under remat."""
    gradients = jax.grad(_loss)(w, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradients)


@dataclass
class Graphs:
    """The custom calls of a program, counted inside and outside of command buffers."""

    inside: int = 0
    outside: int = 0
    beside: list[int] = field(default_factory=list)
    """The number of other kernels in each command buffer that has custom calls."""


def graphs_in(text: str) -> Graphs:
    found, open_at = Graphs(), None
    calls = others = 0
    for indent, kind in (*_thunks(text), (-1, "")):
        if open_at is not None and indent <= open_at:
            if calls:
                found.inside += calls
                found.beside.append(others)
            open_at, calls, others = None, 0, 0
        if open_at is None:
            if kind == "kCommandBuffer":
                open_at = indent
            found.outside += kind == "kCustomCall"
        else:
            calls += kind == "kCustomCall"
            others += kind.startswith(_OTHERS)
    return found


def _thunks(text: str) -> Iterator[tuple[int, str]]:
    """The indent and kind of each thunk, as in "  004: kGemm   ...". Inner thunks are indented."""
    for match in re.finditer(r"^( *)\d+: (k\w+)", text, re.MULTILINE):
        yield len(match[1]), match[2]


def test_a_dump_of_thunks_is_counted_by_command_buffer():
    text = (
        "000: kCustomCall   \n001: kCommandBuffer\t\n  002: kKernel    \t\n  003: kCustomCall\t\n"
        "  004: kGemm\t\n004: kWhile\t\nbody:\n  005: kCommandBuffer\t\n    006: kCustomCall\t\n"
        "  007: kKernel\t\n008: kCommandBuffer\t\n  009: kKernel\t\n"
    )
    assert graphs_in(text) == Graphs(inside=2, outside=1, beside=[2, 0])


def dumped(folder: pathlib.Path, program: str) -> str:
    """The thunks of a program, after XLA's passes if these changed any."""
    files = sorted(folder.glob(f"*jit_{program}*thunk_sequence*"))
    assert files, f"no dump of {program}'s thunks among {[x.name for x in folder.iterdir()][:40]}"
    after = [x for x in files if "after_thunk_passes" in x.name]
    return (after or files)[-1].read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[pathlib.Path, dict[str, np.ndarray]]]:
    """The dump and the results, without command buffers and with JAX's defaults."""
    found = {}
    for name, flags in (("plain", _WITHOUT_GRAPHS), ("captured", "")):
        folder = tmp_path_factory.mktemp(name)
        in_new_process(
            f"""
            import jax, numpy as np
            from tests.gpu.test_command_buffers import decoder, tokens, training, weights
            w, x = weights(), tokens()
            found = {{}}
            for _ in range(4):
                found["decoder"] = jax.block_until_ready(decoder(x, w))
                stepped = jax.block_until_ready(training(x, w))
            found |= {{"training " + name: y for name, y in stepped.items()}}
            arrays = {{name: np.asarray(y, np.float32) for name, y in found.items()}}
            np.savez({str(folder / "results.npz")!r}, **arrays)
            """,
            f"{flags} {_SAME_KERNELS} --xla_dump_to={folder} --xla_dump_hlo_as_text",
        )
        found[name] = folder, dict(np.load(folder / "results.npz"))
    return found


@pytest.mark.parametrize("program", ["decoder", "training"])
def test_command_buffers_contain_our_calls_and_other_kernels(program, runs, record):
    """XLA's defaults apply. In training each body of a loop is one graph."""
    plain, captured = (graphs_in(dumped(runs[x][0], program)) for x in ("plain", "captured"))
    record(program=program, plain=vars(plain), captured=vars(captured))
    assert plain.inside == 0 and plain.outside > 0
    assert captured.outside == 0 and captured.inside == plain.outside
    assert captured.beside and min(captured.beside) >= 4


def test_results_are_equal_with_and_without_graphs(runs, record):
    plain, captured = (runs[x][1] for x in ("plain", "captured"))
    differences = {}
    for name, expected in plain.items():
        assert np.isfinite(expected).all() and np.abs(expected).max() > 0
        differences[name] = float(np.abs(captured[name] - expected).max())
    record(differences=differences)
    assert not any(differences.values())
