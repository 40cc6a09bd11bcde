"""Training steps of public models: the list equals the kernels lowered for an H100."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from examples.smollm2 import model as smollm2
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import dot_product_attention, explain_program
from attn_dispatch.core import traced_calls
from attn_dispatch.typed_jax import is_tracer
from attn_dispatch.whole_programs.places import Place
from tests.support import integration_layers, model_programs
from tests.support.backend import needs_cudnn
from tests.support.integration_layers import LAYERS
from tests.support.integration_layers import X as LAYER_X
from tests.support.model_programs import PROGRAMS, B, D, H, N, T, X, mean
from tests.support.program_lists import checked, struct

pytestmark = needs_cudnn


def runs(found: Any) -> tuple[Any, Any]:
    (call,) = found.calls
    return call.forward_runs.times, call.backward_runs.times


def place(found: Any) -> Place:
    (call,) = found.calls
    assert call.place is not None
    return call.place


@pytest.mark.parametrize("name", [x for x in PROGRAMS if not PROGRAMS[x].is_on_mesh])
def test_a_training_step_is_listed_with_its_kernels(name: str):
    for package in PROGRAMS[name].packages:
        pytest.importorskip(package)
    program = PROGRAMS[name].make()
    found = checked(program.step, *program.args)
    assert runs(found) == (program.forward, program.backward) and found.others == ()
    file, layer = PLACES.get(name, (model_programs.__file__, ""))
    assert place(found).file.endswith(file) and place(found).layer == layer


PLACES = {
    "SmolLM2 in plain JAX": (smollm2.__file__, ""),
    "a decoder in Flax NNX": ("examples/train_packed/model.py", ""),
    "a transformer in Flax Linen": (
        model_programs.__file__,
        "flax's MultiHeadDotProductAttention.__call__",
    ),
    "a transformer in Keras": (
        model_programs.__file__,
        "keras's MultiHeadAttention._compute_attention",
    ),
}
"""The file of the line that makes a program's call, and the framework's method above it."""


def test_the_decoder_of_train_packed_is_listed_with_its_kernels():
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    program = model_programs.train_packed("none")
    assert runs(checked(program.step, *program.args)) == (3, 3)


def test_a_training_step_that_updates_a_module_in_place():
    """The gradients of NNX's training steps are in no result of the function."""
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")
    from attn_dispatch.integrations.flax import attention_fn

    more: dict[str, Any] = {"attention_fn": attention_fn, "dtype": jnp.bfloat16, "decode": False}
    model = nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(0), **more)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: mean(model(x)))(model)
        optimizer.update(model, gradients)
        return loss

    found = explain_program(step, model, optimizer, X, target="h100")
    assert runs(found) == (1, 1) and found.fallbacks == ()
    before = jax.tree.leaves(nnx.state(model))
    assert all(isinstance(x, jax.Array) and not is_tracer(x) for x in before)


def test_a_model_in_a_shard_map_is_listed_with_its_kernels(monkeypatch: pytest.MonkeyPatch):
    """The rows are split along "data". The program is not lowered, as its types say so."""
    monkeypatch.delattr(traced_calls, "of_program")
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    program = model_programs.smollm2_in_a_shard_map(mesh)
    found = checked(program.step, *program.args)
    assert runs(found) == (2, 2)
    assert found.calls[0].explanation.call.shape("query") == (B, T, N, H)
    assert str(found.calls[0].share) == "one device's part, in a shard_map over 'data' (4)"


def test_explicit_axes_split_a_call():
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, P("data", None, "model"))
    q = struct(4 * B, T, 2 * N, H, sharding=sharding)

    def loss(q: Any) -> jax.Array:
        return dot_product_attention(q, q, q, is_causal=True).astype(jnp.float32).sum()

    found = checked(jax.grad(loss), q)
    assert runs(found) == (1, 1)
    assert found.calls[0].explanation.call.shape("query") == (B, T, N, H)
    assert str(found.calls[0].share) == "one device's part, split along 'data' (4), 'model' (2)"


def test_a_program_that_cannot_be_lowered_here_is_listed_whole():
    only_elsewhere = Primitive("only_elsewhere")
    only_elsewhere.def_abstract_eval(lambda x: x)
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    q = struct(B, T, N, H, sharding=NamedSharding(mesh, P(None, None, "model")))

    def program(q: Any) -> Any:
        return dot_product_attention(q, q, only_elsewhere.bind(q), is_causal=True)

    (call,) = explain_program(program, q, target="h100").calls
    assert str(call.share) == "all of it: how XLA splits it is not known"
    assert call.explanation.call.shape("query") == q.shape

    # Two reshapes leave a part of "data" on each of two dims.
    def in_parts(q: Any) -> Any:
        q = q.reshape(2, 2, T, N, H)
        return dot_product_attention(q, q, q, is_causal=True)

    q = struct(4, T, N, H, sharding=NamedSharding(mesh, P("data")))
    (call,) = explain_program(in_parts, q, target="h100").calls
    assert str(call.share) == "all of it: how XLA splits it is not known"


@pytest.mark.parametrize(
    ("name", "through", "what"),
    [
        ("Flax NNX", "flax's MultiHeadAttention.__call__", "jax.nn"),
        ("Flax Linen", "flax's MultiHeadDotProductAttention.__call__", "attention by matrix"),
        ("Equinox", "equinox's MultiheadAttention.__call__", "attention by matrix products"),
        ("Haiku", "haiku's MultiHeadAttention.__call__", "attention by matrix products"),
        ("Keras 3", "keras's MultiHeadAttention._compute_attention", "jax.nn"),
        ("Penzai", "penzai's NamedEinsum.__call__", "attention by matrix products"),
    ],
)
def test_attention_of_each_framework_is_found(name: str, through: str, what: str):
    pytest.importorskip(LAYERS[name].package)
    params, theirs, ours = LAYERS[name].make()
    found = explain_program(jax.grad(lambda *x: theirs(*x).sum()), params, LAYER_X, target="h100")
    (other,) = found.others
    assert found.calls == () and other.what.startswith(what)
    assert other.place is not None and other.place.layer == through
    assert other.place.file == integration_layers.__file__
    found = explain_program(jax.grad(lambda *x: ours(*x).sum()), params, LAYER_X, target="h100")
    assert len(found.calls) == 1 and found.others == ()
