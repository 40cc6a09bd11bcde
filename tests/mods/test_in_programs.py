"""score_mod and mask_mod on meshes and under JAX's transformations and modes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention
from attn_dispatch.programs.tracing import trace
from tests.support.mod_calls import (
    KEY,
    OUT_GRAD,
    SLOPES,
    TABLE,
    TABLES,
    B,
    H,
    N,
    Q,
    S,
    V,
    added,
    as_bias,
    assert_same,
    captured,
    given,
    given_or_captured,
    loss,
    with_bias,
    with_gradients,
)
from tests.support.repository import ROOT, environment


def run(*command: str, **variables: str) -> str:
    env = environment(**variables)
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=env, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# Meshes of eight devices.


@pytest.fixture(scope="module")
def meshes() -> dict[str, Any]:
    return json.loads(run("-m", "tests.mods.mod_meshes").splitlines()[-1])


@pytest.mark.parametrize("how", ["jit", "shard_map", "vmap"])
def test_sharded_arrays_give_the_results_of_one_device(meshes, how: str):
    """Under shard_map, the results are those of each device's call."""
    errors = meshes[how]
    assert errors and {x: y for x, y in errors.items() if not y <= 1e-4} == {}


def test_sharded_captured_arrays_run_or_raise(meshes):
    """Explicit axes raise on older JAX; under shard_map only simple functions run."""
    found = meshes["captured and sharded"]
    whole = (
        "score_mod: expected a captured array to lie whole on every device along Explicit mesh "
        "axes and those of shard_map; one that is sharded pass in score_mod_args; "
    )
    explicit = found.pop("Explicit")  # newer versions of JAX run it
    assert explicit <= 1e-4 if isinstance(explicit, float) else explicit.startswith(whole)
    assert found.pop("shard_map, a loop").startswith(whole)
    assert found.pop("shard_map, a rule") == (
        "score_mod: expected no custom derivative beside a captured array that differs between "
        "the devices of shard_map; pass the array in score_mod_args"
    )
    assert len(found) == 4 and max(found.values()) <= 1e-4


# Transformations.


@given_or_captured
def test_nested_vmap_agrees_with_a_bias(call):
    queries = jnp.stack([jnp.stack([Q, 2 * Q]), jnp.stack([3 * Q, Q]), jnp.stack([Q, -Q])])

    def nested(f):
        return jax.vmap(jax.vmap(f, (0, None)))

    for make in (
        lambda f: nested(jax.value_and_grad(loss(f), (0, 1))),
        lambda f: lambda *x: with_gradients(nested(f), *x),
    ):
        assert_same(*(jax.jit(make(f))(queries, TABLES) for f in (call, with_bias)))


def test_vmap_does_not_copy_shared_arrays():
    shared = jax.make_jaxpr(jax.vmap(given, (0, None)))(jnp.stack([Q] * 3), TABLE)
    mapped = jax.make_jaxpr(jax.vmap(given))(jnp.stack([Q] * 3), TABLES)
    assert "f32[1,1,4,8]" in str(shared) and "f32[3,1,4,8]" not in str(shared)
    assert "f32[3,1,4,8]" in str(mapped)


_POLICIES = {
    "none": None,
    "context": jax.checkpoint_policies.save_only_these_names("context"),
}


@pytest.mark.parametrize("policy", _POLICIES)
def test_scan_over_layers_with_different_tables(policy: str):
    def network(layer):
        if policy != "none":
            layer = jax.checkpoint(layer, policy=_POLICIES[policy])
        return lambda q, tables: jax.lax.scan(lambda x, y: (layer(x, y), None), q, tables)[0]

    programs = (
        jax.jit(jax.value_and_grad(loss(network(f)), (0, 1))) for f in (captured, with_bias)
    )
    assert_same(*(f(Q, TABLES) for f in programs))


def test_lax_map_over_tables():
    def program(call):
        return jax.jit(
            lambda x: with_gradients(
                lambda y: jax.lax.map(lambda z: call(Q, z), y, batch_size=2), x
            )
        )

    assert_same(*(program(f)(TABLES) for f in (captured, with_bias)))


def test_forward_mode_and_hessian_agree_with_a_bias():
    tangents = (OUT_GRAD, 2 * TABLE)
    for make in (
        lambda f: lambda *x: jax.jvp(f, x, tangents),
        lambda f: lambda *x: jax.linearize(f, *x)[1](*tangents),
        lambda f: jax.jacfwd(f, 1),
        lambda f: jax.hessian(loss(f), 1),
    ):
        assert_same(*(jax.jit(make(f))(Q, TABLE) for f in (captured, with_bias)), tolerance=1e-3)


# JAX's modes.


@pytest.mark.parametrize("mode", [jax.disable_jit, jax.debug_nans])
def test_debug_modes_accept_nan_in_masked_pairs(mode):
    def nan_where_masked(q):
        return dot_product_attention(
            q, KEY, V, score_mod=lambda score, b, n, t, s: score - jnp.log1p((t - s) * 1.0),
            mask_mod=lambda b, n, t, s: s <= t,
        )  # fmt: skip

    def step(q, table):
        return with_gradients(captured, q, table), with_gradients(nan_where_masked, q)

    expected = step(Q, TABLE)
    with mode(True):
        assert_same([step(Q, TABLE), jax.jit(step)(Q, TABLE)], [expected] * 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mods_under_strict_promotion(dtype: str):
    def mod(score, b, n, t, s, table):
        return score + table[n, jnp.clip(t - s + 4, 0, 7)].astype(score.dtype)

    def call(q, table):
        out = dot_product_attention(
            q, KEY.astype(dtype), V.astype(dtype), score_mod=mod, score_mod_args=(table,),
            mask_mod=lambda b, n, t, s: s <= t + b, sinks=SLOPES, logits_soft_cap=3.0,
        )  # fmt: skip
        return out.astype(jnp.float32).sum()

    gradient = jax.grad(call, (0, 1))
    with jax.numpy_dtype_promotion("strict"):
        for table in (TABLE, TABLE.astype(jnp.bfloat16)):
            q = Q.astype(dtype)
            jax.jit(lambda *x: jax.jvp(gradient, x, x)).lower(q, table)
            jax.jit(jax.vmap(gradient, (None, 0))).lower(q, jnp.stack([table, table]))


def test_mods_under_x64():
    with jax.enable_x64(True):
        q, k, v, table = (x.astype(jnp.float64) for x in (Q, KEY, V, TABLE))

        def gradients(**options):
            return jax.grad(lambda q: (dot_product_attention(q, k, v, **options) ** 2).sum())(q)

        got = gradients(score_mod=added, score_mod_args=(table,))
        assert_same(got, gradients(bias=as_bias(table)), tolerance=1e-10)
        # Python numbers are weakly typed.
        mod = trace("score_mod", lambda score, b, n, t, s, x: score * x, (2.0,), "float32")
        assert mod.program.body.out_avals[0].dtype == jnp.float32


_IN_A_NEW_PROCESS = """
import sys, jax, numpy as np
folder = sys.argv[1]
arrays = np.load(folder + "/arrays.npz")
q, k, v, table, *expected = (arrays[x] for x in arrays.files)
with open(folder + "/program", "rb") as file:
    call = jax.export.deserialize(bytearray(file.read())).call
for x, y in zip(jax.tree.leaves(jax.jit(call)(q, k, v, table)), expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
assert "attn_dispatch" not in sys.modules
"""


def test_export_with_a_symbolic_batch_runs_without_this_package(tmp_path):
    def step(q, k, v, table):
        def call(q, table):
            return dot_product_attention(
                q, k, v, score_mod=lambda *x: added(*x, table),
                mask_mod=lambda b, n, t, s: s <= t + n + b,
            )  # fmt: skip

        return with_gradients(call, q, table)

    (batch,) = jax.export.symbolic_shape("batch")
    types = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (Q, KEY, V)]
    arrays = (Q, KEY, V, TABLE)
    written = jax.export.export(jax.jit(step))(*types, TABLE).serialize()
    (tmp_path / "program").write_bytes(written)
    np.savez(tmp_path / "arrays.npz", *map(np.asarray, (*arrays, *jax.tree.leaves(step(*arrays)))))
    run("-c", _IN_A_NEW_PROCESS, str(tmp_path))


def test_symbolic_lengths_raise():
    (t,) = jax.export.symbolic_shape("t")
    q = jax.ShapeDtypeStruct((B, t, N, H), jnp.float32)
    call = jax.jit(
        lambda q: dot_product_attention(q, q, q, score_mod=added, score_mod_args=(TABLE,))
    )
    with pytest.raises(NotImplementedError, match="score_mod: lengths must be known, and one of t"):
        jax.export.export(call)(q)


_CACHED = """
import sys, jax, jax.numpy as jnp
from attn_dispatch import dot_product_attention
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
x = jnp.sin(jnp.arange(512.0)).reshape(1, 16, 4, 8)
for factor in (0.1, 0.2):
    mod = lambda score, b, n, t, s: jax.nn.softplus(score) - factor * s
    lowered = jax.jit(lambda x: dot_product_attention(x, x, x, score_mod=mod)).lower(x)
    events.clear()
    out = lowered.compile()(x)
    print(any(e.endswith("cache_hits") for e in events), float(jnp.abs(out).sum()))
"""


def test_compilation_cache_distinguishes_mods(tmp_path):
    """A second process finds the first one's programs, and different mods have different ones."""
    first, second = (
        [line.split() for line in run("-c", _CACHED, str(tmp_path)).splitlines()] for _ in range(2)
    )
    assert [x for x, _ in first] == ["False"] * 2 and [x for x, _ in second] == ["True"] * 2
    assert [x for _, x in first] == [x for _, x in second] and first[0][1] != first[1][1]


# Threads, and functions that are created again for each call.


def test_threads_can_trace_different_mods_at_once():
    barrier, found = threading.Barrier(4), {}

    def work(i: int) -> None:
        barrier.wait()
        for j in range(4):
            factor = float(4 * i + j)
            mod = lambda score, b, n, t, s: score - factor * s  # noqa: B023, E731
            found[factor] = dot_product_attention(Q, KEY, V, score_mod=mod)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    for factor, out in found.items():
        bias = -factor * jnp.arange(S, dtype=jnp.float32)
        assert_same(out, dot_product_attention(Q, KEY, V, bias))


def test_equal_functions_are_compiled_once(caplog):
    def step():
        mod = lambda score, b, n, t, s: score + SLOPES[n] * (t - s)  # noqa: E731
        mask = lambda b, n, t, s: s <= t + 1  # noqa: E731
        call = lambda q: dot_product_attention(q, KEY, V, score_mod=mod, mask_mod=mask)  # noqa: E731
        return with_gradients(call, Q)

    step()
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        caplog.clear()
        step()
        assert [x.message for x in caplog.records if "ompil" in x.message] == []
