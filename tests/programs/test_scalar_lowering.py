"""Straight-line code of programs: its values against JAX's, and the operations that have none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import mods
from attn_dispatch.fa4.score_variant import ScoreChange, ScoreVariant, variant_of
from attn_dispatch.programs.nodes import Unsupported
from attn_dispatch.programs.tracing import Mod, trace
from tests.support import scalar_code_in_numpy as in_numpy
from tests.support import score_mods
from tests.support.repository import environment

HEADS, BATCH, PLACES = 6, 3, 300
SLOPES = jnp.asarray(np.linspace(0.5, -0.25, HEADS), jnp.float32)
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(32, HEADS)), jnp.float32)
PLACE_OF = jnp.asarray([2, 0, 5, -1, 9, 1], jnp.int32)
NARROW = SLOPES.astype(jnp.bfloat16)
FLAGS = jnp.asarray([True, False, True, True, False, False])


@jax.custom_jvp
def straight_through(x):
    return jnp.floor(x)


straight_through.defjvp(lambda given, tangents: (jnp.floor(given[0]), tangents[0] * 0.5))

MODS = {
    "soft cap": mods.soft_cap(2.5),
    "ALiBi": mods.alibi(SLOPES),
    "ALiBi, 16 bits": mods.alibi(SLOPES.astype(jnp.bfloat16)),
    "T5": mods.relative_position(TABLE),
    "T5, one direction": mods.relative_position(TABLE[:8], bidirectional=False, max_distance=20),
    "offset": mods.with_query_offset(mods.alibi(SLOPES), 17),
    "clip and where": lambda x, b, n, t, s: jnp.where(
        jnp.clip(t - s, -5, 9) > 3, x * 1.5, x - jnp.clip(t - s, -5, 9) / 9
    ),
    "buckets": lambda x, b, n, t, s: x
    + SLOPES[jnp.minimum(jnp.log2(jnp.abs(t - s) + 1.5).astype(jnp.int32), HEADS - 1)],
    "division": lambda x, b, n, t, s: x + ((t - s) // 7 + (t - s) % 5 - t // 3 + s % 4) / 8,
    "truncation": lambda x, b, n, t, s: x + jax.lax.div(t - s, 7) + jax.lax.rem(t - s, 5),
    "two axes": lambda x, b, n, t, s: x * TABLE[n, b] + TABLE[s % 32, n] + TABLE[jnp.abs(t - s)][n],
    "outside": lambda x, b, n, t, s: x + SLOPES[s - t] + SLOPES.at[t - 4].get(mode="clip"),
    "places": lambda x, b, n, t, s: x + SLOPES[PLACE_OF[n]] * jnp.where(FLAGS[n], 1.0, x),
    "constant place": lambda x, b, n, t, s: x * SLOPES[2] + TABLE[n, 1] + TABLE[-1][n],
    "functions": lambda x, b, n, t, s: jnp.exp(-x * x) + jax.nn.gelu(x) + jnp.sin(x) * jnp.cos(x)
    + jax.nn.sigmoid(x) + jnp.log1p(x**2) + jnp.expm1(x / 4) + jnp.exp2(x)
    + jnp.sqrt(jnp.abs(x) + 1) + jax.lax.rsqrt(x * x + 1),
    "steps": lambda x, b, n, t, s: jnp.floor(x) + jnp.ceil(x) * x + jnp.round(x * 3) + jnp.sign(x)
    + jnp.where(x == 0, 1.0, x) ** -2 + jnp.abs(x),
    "logic": lambda x, b, n, t, s: jnp.where(
        ((t > s) | (n == 2)) & ~(b == 1) ^ (s < 9), x, jnp.where(jnp.isfinite(x), -x, 0)
    ),
    "bits": lambda x, b, n, t, s: x + ((t ^ s) & 7) - (~n | 2),
    "powers": lambda x, b, n, t, s: x - jnp.abs(t - s) * 2.0 ** (-8.0 * (n + 1) / HEADS),
    "custom derivative": lambda x, b, n, t, s: straight_through(x * 3),
    "everything": score_mods.by_head_and_place,
    "one head": lambda x, b, n, t, s: jnp.where(n == 0, x, jnp.maximum(x, 0.25)),
    "nothing": lambda x, b, n, t, s: x,
    "a constant": lambda x, b, n, t, s: 0.5,
}  # fmt: skip


def of_erf(x, b, n, t, s):
    return jax.lax.erf(x)


HAS_ERF = "bitcast" not in str(jax.make_jaxpr(jax.grad(jax.lax.erf))(1.0))
"""From JAX 0.12 on, the derivative of erf takes a number apart by its bits."""
if HAS_ERF:
    MODS["erf"] = of_erf


def traced(mod) -> Mod:
    return trace("score_mod", mod, (), "float32")


def inputs(seed: int = 0) -> tuple[np.ndarray, ...]:
    """g, x, b, n, t and s of many pairs."""
    random = np.random.default_rng(seed)
    scores = random.normal(size=(2, 4000)).astype(np.float32) * 2
    scores[1, :9] = 0  # where both operands of a maximum may be equal
    limits = (BATCH, HEADS, PLACES, PLACES)
    return (*scores, *(random.integers(0, x, 4000, dtype=np.int32) for x in limits))


def arrays_of(variant: ScoreVariant, mod: Mod, start: tuple[int, int]) -> list[np.ndarray]:
    """The arrays that the code reads, flat, as kernels get them."""
    of_call = {f"score_mod_{i}": x for i, x in enumerate(mod.arrays)}
    of_call["mods_start"] = jnp.asarray(start, jnp.int32)
    found = [np.asarray(of_call[x]).reshape(-1) for x in variant.arrays]
    kinds = {"f": np.float32, "i": np.int32}
    return [x.astype(kinds[y]) for x, y in zip(found, variant.types, strict=True)]


def differences(variant: ScoreVariant, mod: Mod, function, start=(0, 0)) -> tuple[float, float]:
    """The largest errors of the code's values and gradients, relative to JAX's largest."""
    g, x, b, n, t, s = inputs()
    read = arrays_of(variant, mod, start)

    def of_one(x, b, n, t, s):
        return jnp.asarray(function(x, b + start[0], n + start[1], t, s), jnp.float32)

    right = jax.vmap(of_one)(x, b, n, t, s)
    slopes = jax.vmap(jax.grad(of_one))(x, b, n, t, s)
    made = in_numpy.forward(variant.forward, (x, b, n, t, s), read)
    gradient = in_numpy.backward(variant.backward, (g, x, b, n, t, s), read)
    return _difference(made, np.asarray(right)), _difference(gradient, np.asarray(g * slopes))


def _difference(got: np.ndarray, right: np.ndarray) -> float:
    got = np.broadcast_to(got, right.shape)
    assert np.isfinite(right).all()
    return float(np.abs(got - right).max() / max(np.abs(right).max(), 1e-3))


@pytest.mark.parametrize("name", MODS)
def test_values_and_derivatives_agree_with_jax(name: str):
    mod = traced(MODS[name])
    variant = variant_of(ScoreChange(score_mod=mod.program))
    assert max(differences(variant, mod, MODS[name])) < 2e-6


@pytest.mark.parametrize("name", ["ALiBi", "T5", "one head"])
def test_a_part_of_a_call_counts_rows_and_heads_from_its_first(name: str):
    def other_places(x, b, n, t, s):
        return MODS[name](x, b, n % HEADS, t, s) + (b == 2)

    mod = traced(other_places)
    variant = variant_of(ScoreChange(score_mod=mod.program))
    assert max(differences(variant, mod, other_places, start=(1, 2))) < 2e-6


def test_a_soft_cap_comes_before_a_score_mod_and_slopes_after():
    mod = traced(lambda x, b, n, t, s: x * x)
    variant = variant_of(ScoreChange(3.0, mod.program, has_slopes=True))
    g, x, b, n, t, s = inputs()
    slopes = np.asarray(SLOPES)

    def right(x, n, t, s):
        return (3 * jnp.tanh(x / 3)) ** 2 - SLOPES[n] * jnp.abs(t - s)

    made = in_numpy.forward(variant.forward, (x, b, n, t, s), [slopes])
    np.testing.assert_allclose(made, right(x, n, t, s), rtol=1e-4, atol=1e-4)
    gradient = in_numpy.backward(variant.backward, (g, x, b, n, t, s), [slopes])
    expected = g * jax.vmap(jax.grad(right))(x, n, t, s)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


# A wrong line is noticed.

_SWAPS = {
    "add": "sub", "sub": "add", "mul": "add", "min": "max", "max": "min", "lt": "le", "gt": "ge",
    "ge": "gt", "tanh": "exp", "abs_int": "neg", "select": "swapped", "quotient": "remainder",
    "and_": "or_", "or_": "and_", "eq": "ne",
}  # fmt: skip


def _mutants(code: str):
    lines = code.split("; ")
    for i, line in enumerate(lines[:-1]):
        name, _, rest = line.partition(" = ")
        operation, _, operands = rest.partition("(")
        if (other := _SWAPS.get(operation)) is None:
            continue
        if other == "swapped":
            condition, yes, no = operands.rstrip(")").split(", ")
            other, operands = "select", f"{condition}, {no}, {yes})"
        yield "; ".join([*lines[:i], f"{name} = {other}({operands}", *lines[i + 1 :]])


_MUTATED = ("soft cap", "ALiBi", "T5, one direction", "clip and where", "everything")


@pytest.mark.parametrize("name", _MUTATED)
def test_code_with_another_operation_is_noticed(name: str):
    mod = traced(MODS[name])
    right = variant_of(ScoreChange(score_mod=mod.program))
    wrong = [replace(right, forward=x) for x in _mutants(right.forward)]
    wrong += [replace(right, backward=x) for x in _mutants(right.backward)]
    assert len(wrong) >= 3
    errors = {x: max(differences(x, mod, MODS[name], start=(1, 2))) for x in wrong}
    assert [(x.forward, x.backward) for x, error in errors.items() if error < 1e-3] == []


# Operations without code.


@pytest.mark.skipif(HAS_ERF, reason="this JAX computes the derivative of erf without bits")
def test_the_derivative_of_erf_has_no_code():
    with pytest.raises(Unsupported, match="its derivative: bitcast_convert_type in uint32"):
        variant_of(ScoreChange(score_mod=traced(of_erf).program))


@pytest.mark.parametrize(
    ("mod", "sentence"),
    [
        (lambda x, b, n, t, s: x + jnp.sort(TABLE[n])[0], "sort of arrays"),
        (lambda x, b, n, t, s: x + TABLE[n, :2].sum(), "dynamic_slice makes an array"),
        (lambda x, b, n, t, s: x + SLOPES.mean(), "reduce_sum of an array"),
        (lambda x, b, n, t, s: jax.lax.fori_loop(0, 3, lambda i, y: 2 * y, x), "scan has no"),
        (lambda x, b, n, t, s: x.astype(jnp.bfloat16) * 1.0, "convert_element_type in bfloat16"),
        (lambda x, b, n, t, s: x + jax.lax.digamma(x), "digamma has no code"),
        (lambda x, b, n, t, s: x + NARROW[n] * jnp.bfloat16(2), "mul in bfloat16"),
        (lambda x, b, n, t, s: x + PLACE_OF.astype(jnp.int8)[n] ** 2, "type in int8"),
    ],
)  # fmt: skip
def test_an_operation_without_code_is_named_with_its_line(mod, sentence: str):
    program = traced(mod).program
    with pytest.raises(Unsupported, match=sentence) as caught:
        variant_of(ScoreChange(score_mod=program))
    assert caught.value.line.startswith("test_scalar_lowering.py:")


def test_a_distance_is_a_difference_of_floats():
    code = variant_of(ScoreChange(has_slopes=True)).forward
    assert "f1 = to_float(t); f2 = to_float(s); f3 = sub(f1, f2); f4 = abs_(f3)" in code


# Digests.


def digest(mod, **change) -> str:
    return variant_of(ScoreChange(score_mod=traced(mod).program, **change)).digest


def test_the_same_computation_has_the_same_digest_whoever_writes_it():
    def capped(score, batch, head, query, key):
        return 2.5 * jnp.tanh(score / 2.5)

    assert digest(capped) == digest(mods.soft_cap(2.5)) == variant_of(ScoreChange(2.5)).digest
    assert digest(mods.alibi(SLOPES)) == digest(mods.alibi(jnp.ones(64, jnp.bfloat16)))


def test_digests_differ_by_what_is_computed():
    found = [digest(x) for x in MODS.values()]
    found += [digest(mods.soft_cap(x)) for x in (2.0, 50.0)]
    # Of two with the same code, 16-bit slopes are read as 32 bits, and an offset is an array.
    assert len({*found}) == len(found) - 1
    other = jax.custom_jvp(jnp.floor)
    other.defjvp(lambda given, tangents: (jnp.floor(given[0]), tangents[0] * 0.25))
    assert digest(lambda x, b, n, t, s: other(x * 3)) != digest(MODS["custom derivative"])


def test_digests_are_the_same_in_another_process():
    code = (
        "from tests.programs.test_scalar_lowering import MODS, digest;"
        "print(*(digest(x) for x in MODS.values()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env=environment(PYTHONHASHSEED="7"), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [digest(x) for x in MODS.values()]
