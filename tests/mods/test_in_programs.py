"""score_mod and mask_mod inside the programs that users write: meshes, transformations, modes."""

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

from attn_dispatch import dot_product_attention, explain
from attn_dispatch.programs.tracing import trace
from tests.support.repository import ROOT, environment

B, T, S, N, K, H = 2, 9, 11, 4, 2, 8
_rng = np.random.default_rng(0)
Q, KEY, V = (
    jnp.asarray(_rng.standard_normal(x), jnp.float32)
    for x in ((B, T, N, H), (B, S, K, H), (B, S, K, H))
)
OUT_GRAD = jnp.asarray(_rng.standard_normal(Q.shape), jnp.float32)
TABLE = jnp.asarray(_rng.standard_normal((N, 8)), jnp.float32)
TABLES = jnp.stack([TABLE, 2 * TABLE, -TABLE])
SLOPES = jnp.asarray(_rng.random(N), jnp.float32)


def added(score, b, n, t, s, table):
    return score + table[n, jnp.clip(t - s + 4, 0, 7)] * (1 + b)


def as_bias(table: jax.Array, t: Any = None, s: Any = None) -> jax.Array:
    """What `added` adds, [B, N, T, S]."""
    b, n, all_t, all_s = jnp.ogrid[:B, :N, :T, :S]
    return added(0.0, b, n, all_t if t is None else t, all_s if s is None else s, table)


def given(q, table, **options):
    return dot_product_attention(q, KEY, V, score_mod=added, score_mod_args=(table,), **options)


def captured(q, table, **options):
    return dot_product_attention(q, KEY, V, score_mod=lambda *x: added(*x, table), **options)


def written_out(q, table, **options):
    return dot_product_attention(q, KEY, V, as_bias(table), **options)


both_ways = pytest.mark.parametrize("call", [given, captured])


def loss(call):
    return lambda *x: (call(*x) * OUT_GRAD).sum()


def with_gradients(call, *arrays):
    out, pull = jax.vjp(call, *arrays)
    return out, pull(jnp.cos(out))


def assert_same(got: Any, expected: Any, tolerance: float = 1e-4) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


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
def test_sharded_arrays(meshes, how: str):
    """Values and gradients are those of one device; under shard_map, those of each one's call."""
    errors = meshes[how]
    assert errors and {x: y for x, y in errors.items() if not y <= 1e-4} == {}


def test_captured_arrays_that_are_sharded(meshes):
    """Where their types tell, little can be done with them; under shard_map, what is plain."""
    said = meshes["captured and sharded"]
    whole = (
        "score_mod: expected a captured array to lie whole on every device along Explicit mesh "
        "axes and those of shard_map; one that is sharded pass in score_mod_args; "
    )
    explicit = said.pop("Explicit")  # newer ones of JAX can do it
    assert explicit <= 1e-4 if isinstance(explicit, float) else explicit.startswith(whole)
    assert said.pop("shard_map, a loop").startswith(whole)
    assert said.pop("shard_map, a rule") == (
        "score_mod: expected no custom derivative beside a captured array that differs between "
        "the devices of shard_map; pass the array in score_mod_args"
    )
    assert len(said) == 4 and max(said.values()) <= 1e-4


# Transformations.


@both_ways
def test_nested_vmap(call):
    queries = jnp.stack([jnp.stack([Q, 2 * Q]), jnp.stack([3 * Q, Q]), jnp.stack([Q, -Q])])

    def nested(f):
        return jax.vmap(jax.vmap(f, (0, None)))

    for make in (
        lambda f: nested(jax.value_and_grad(loss(f), (0, 1))),
        lambda f: lambda *x: with_gradients(nested(f), *x),
    ):
        assert_same(*(jax.jit(make(f))(queries, TABLES) for f in (call, written_out)))


def test_vmap_does_not_copy_what_is_shared():
    shared = jax.make_jaxpr(jax.vmap(given, (0, None)))(jnp.stack([Q] * 3), TABLE)
    own = jax.make_jaxpr(jax.vmap(given))(jnp.stack([Q] * 3), TABLES)
    assert "f32[1,1,4,8]" in str(shared) and "f32[3,1,4,8]" not in str(shared)
    assert "f32[3,1,4,8]" in str(own)


_POLICIES = {
    "none": None,
    "context": jax.checkpoint_policies.save_only_these_names("context"),
}


@pytest.mark.parametrize("policy", _POLICIES)
def test_scan_over_layers_with_a_table_each(policy: str):
    def network(layer):
        if policy != "none":
            layer = jax.checkpoint(layer, policy=_POLICIES[policy])
        return lambda q, tables: jax.lax.scan(lambda x, y: (layer(x, y), None), q, tables)[0]

    programs = (
        jax.jit(jax.value_and_grad(loss(network(f)), (0, 1))) for f in (captured, written_out)
    )
    assert_same(*(f(Q, TABLES) for f in programs))


def test_map():
    def program(call):
        return jax.jit(
            lambda x: with_gradients(
                lambda y: jax.lax.map(lambda z: call(Q, z), y, batch_size=2), x
            )
        )

    assert_same(*(program(f)(TABLES) for f in (captured, written_out)))


def test_other_derivatives():
    tangents = (OUT_GRAD, 2 * TABLE)
    for make in (
        lambda f: lambda *x: jax.jvp(f, x, tangents),
        lambda f: lambda *x: jax.linearize(f, *x)[1](*tangents),
        lambda f: jax.jacfwd(f, 1),
        lambda f: jax.hessian(loss(f), 1),
    ):
        assert_same(*(jax.jit(make(f))(Q, TABLE) for f in (captured, written_out)), tolerance=1e-3)


# Modes.


@pytest.mark.parametrize("mode", [jax.disable_jit, jax.debug_nans])
def test_debug_modes(mode):
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
def test_strict_promotion(dtype: str):
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


def test_x64():
    with jax.enable_x64(True):
        q, k, v, table = (x.astype(jnp.float64) for x in (Q, KEY, V, TABLE))

        def gradients(**options):
            return jax.grad(lambda q: (dot_product_attention(q, k, v, **options) ** 2).sum())(q)

        got = gradients(score_mod=added, score_mod_args=(table,))
        assert_same(got, gradients(bias=as_bias(table)), tolerance=1e-10)
        # Numbers of Python are of no dtype.
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


def test_export_with_a_symbolic_batch(tmp_path):
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


def test_symbolic_lengths_have_a_reason():
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


def test_compilation_cache(tmp_path):
    """A second process finds the programs of the first, and no mod finds another's."""
    first, second = (
        [line.split() for line in run("-c", _CACHED, str(tmp_path)).splitlines()] for _ in range(2)
    )
    assert [x for x, _ in first] == ["False"] * 2 and [x for x, _ in second] == ["True"] * 2
    assert [x for _, x in first] == [x for _, x in second] and first[0][1] != first[1][1]


# Beside other options.

OPTIONS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_rate": 0.4, "dropout_key": jax.random.key(1)},
    "sinks, ALiBi": {"sinks": SLOPES, "alibi_slopes": SLOPES},
    "soft cap": {"logits_soft_cap": 1.5},
    "scale": {"scale": SLOPES},
    "window": {"local_window_size": (2, 1)},
    "lengths, bottom right": {
        "query_seq_lengths": np.array([3, 9]), "key_value_seq_lengths": np.array([11, 2]),
        "is_causal": True, "causal_alignment": "bottom_right",
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::attn_dispatch.AttentionConventionWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_other_options(name: str):
    programs = (
        jax.jit(lambda *x, f=f: with_gradients(lambda *y: f(*y, **OPTIONS[name]), *x))
        for f in (captured, written_out)
    )
    assert_same(*(f(Q, TABLE) for f in programs))


def test_segments_in_any_order():
    ids = np.array([[2, 1, 2, 1, 0, 3, 3, 1, 2], [1, 1, 1, 5, 5, 5, 0, 0, 9]])
    key_ids = np.array([[1, 2, 1, 2, 0, 3, 3, 1, 2, 2, 2], [9, 9, 5, 5, 5, 1, 1, 1, 1, 0, 0]])
    places, key_places = (
        np.array([[(row[:i] == x).sum() for i, x in enumerate(row)] for row in rows])
        for rows in (ids, key_ids)
    )
    t, s = places[:, None, :, None], key_places[:, None, None, :]
    is_same = ids[:, None, :, None] == key_ids[:, None, None, :]

    def ours(q, table):
        segments: dict[str, Any] = {"query_segment_ids": ids, "key_value_segment_ids": key_ids}
        return given(q, table, mask_mod=lambda b, n, t, s: s <= t, **segments)

    def plain(q, table):
        mask = is_same & (ids[:, None, :, None] > 0) & (s <= t)
        return dot_product_attention(q, KEY, V, as_bias(table, t, s), mask)

    assert_same(*(with_gradients(f, Q, TABLE) for f in (ours, plain)))


@pytest.mark.parametrize("lengths", [(1, S), (T, 1), (1, 1), (0, S), (T, 0)])
def test_short_and_empty(lengths):
    t, s = lengths

    def program(**options):
        call = lambda q, k, v: dot_product_attention(q, k, v, **options)  # noqa: E731
        return with_gradients(call, Q[:, :t], KEY[:, :s], V[:, :s])

    mask = np.arange(s) <= np.arange(t)[:, None] + 1
    got = program(score_mod=added, score_mod_args=(TABLE,), mask_mod=lambda b, n, t, s: s <= t + 1)
    assert_same(got, program(bias=as_bias(TABLE)[:, :, :t, :s], mask=mask))


# What a mod may be.


def _after_loop(score, b, n, t, s):
    return jax.lax.fori_loop(0, 3, lambda i, x: x + jax.nn.relu(TABLE[n, i]), score)


def _after_branch(score, b, n, t, s):
    return jax.lax.cond(t > s, jax.nn.softplus, lambda x: SLOPES[n] * x, score)


MODS = {
    "one score for all": (lambda score, b, n, t, s: 1.0, lambda x, n, t, s: 0 * x),
    "the score as it is": (lambda score, b, n, t, s: score, lambda x, n, t, s: x),
    "without the score": (lambda score, b, n, t, s: -1.0 * s, lambda x, n, t, s: 0 * x - s),
    "a loop": (_after_loop, lambda x, n, t, s: x + jax.nn.relu(TABLE[n, :3]).sum(-1)),
    "branches": (
        _after_branch, lambda x, n, t, s: jnp.where(t > s, jax.nn.softplus(x), SLOPES[n] * x)
    ),
    "bfloat16": (
        lambda score, b, n, t, s: score.astype(jnp.bfloat16),
        lambda x, n, t, s: x.astype(jnp.bfloat16).astype(jnp.float32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODS)
def test_what_a_mod_may_be(name: str):
    mod, of_scores = MODS[name]
    _, n, t, s = jnp.ogrid[:B, :N, :T, :S]

    def plain(q):
        scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, K, N // K, H), KEY) * H**-0.5
        p = jax.nn.softmax(of_scores(scores.reshape(B, N, T, S), n, t, s))
        return jnp.einsum("bkgts,bskh->btkgh", p.reshape(B, K, -1, T, S), V).reshape(Q.shape)

    ours = lambda q: dot_product_attention(q, KEY, V, score_mod=mod)  # noqa: E731
    assert_same(
        *(with_gradients(f, Q) for f in (ours, plain)), tolerance=2e-2 if "16" in name else 1e-4
    )


@pytest.mark.parametrize("answer", [True, np.bool_(False)])
def test_a_mask_mod_with_one_answer(answer: Any):
    """If no pair may attend, all results are 0, whatever score_mod returns."""
    got = with_gradients(lambda *x: captured(*x, mask_mod=lambda b, n, t, s: answer), Q, TABLE)
    expected = with_gradients(written_out, Q, TABLE)
    assert_same(got, expected if answer else jax.tree.map(jnp.zeros_like, expected))


def test_large_arrays_are_no_constants_of_the_program():
    large = jnp.ones((N, 1 << 20), jnp.float32)
    for x in (large, np.asarray(large)):
        mod = lambda score, b, n, t, s, x=x: score + jnp.asarray(x)[n, t * s]  # noqa: E731
        call = jax.jit(lambda q, mod=mod: dot_product_attention(q, KEY, V, score_mod=mod))
        assert len(call.lower(Q).as_text()) < 100_000
        assert len(trace("score_mod", mod, (), "float32").program.text) < 2000


def test_keys_and_strings_are_no_arrays_of_a_mod():
    key = jax.random.key(0)
    mod = lambda score, b, n, t, s, x: score  # noqa: E731
    with pytest.raises(ValueError, match=r"score_mod_args: expected numbers, got a PRNG key; pass"):
        dot_product_attention(Q, KEY, V, score_mod=mod, score_mod_args=(key,))
    with pytest.raises(
        ValueError, match=r"score_mod_args: expected arrays or pytrees of them, got"
    ):
        dot_product_attention(Q, KEY, V, score_mod=mod, score_mod_args=("x",))
    noise = lambda score, b, n, t, s: score + jax.random.normal(jax.random.fold_in(key, t))  # noqa: E731
    with pytest.raises(
        ValueError, match="score_mod: a captured array: expected numbers, got a PRNG"
    ):
        dot_product_attention(Q, KEY, V, score_mod=noise)


def test_explain_of_types():
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (Q, KEY, V, TABLE)]
    found = explain(*types[:3], score_mod=added, score_mod_args=(types[3],))
    assert str(found) == str(explain(Q, KEY, V, score_mod=added, score_mod_args=(TABLE,)))


# Threads, and functions made anew each time.


def test_threads_trace_different_mods_at_once():
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


def test_equal_functions_made_anew_are_compiled_once(caplog):
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
