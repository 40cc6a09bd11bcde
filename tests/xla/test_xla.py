"""The XLA implementation against the float64 reference, case by case."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import xla
from attn_dispatch.devices.device import Device
from attn_dispatch.semantics.invalid_values import without_nan_lse
from attn_dispatch.xla import blocks
from attn_dispatch.xla.blocks import Block, BlockSizes, for_each_block
from attn_dispatch.xla.dropout import dropout_head_keys, dropout_keep_mask
from attn_dispatch_tools.verify.case import Case, lse_dtype, spec_of
from attn_dispatch_tools.verify.judge import SLACK, allowances, error
from attn_dispatch_tools.verify.naive import Naive, naive
from attn_dispatch_tools.verify.reference import Operands, poison_padding, reference
from tests.support.small_cases import CASES

CPU = Device("cpu", "cpu", "CPU")
OTHER = Device("other", "other", "an accelerator")
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


def call(function: Any, options: Any, operands: Any, device: Device = CPU) -> tuple[Any, ...]:
    """Call xla.forward or xla.backward and check its results' types against `spec.results`."""
    spec = spec_of(options, operands)
    assert xla.not_supported_reasons(spec, device) == ()
    given = {name: operands[name] for name in options.operands}
    if spec.is_backward:
        given = without_nan_lse(spec, given)  # as core/primitive.py does
    results = function(spec, device, given)
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in spec.results]
    return results


def run(case: Case, device: Device = CPU, poison: float = np.nan) -> Operands:
    """out, lse and all gradients of a case, with `poison` in all padding."""
    forward_options, options = case.forward_options(), case.backward_options()
    given = case.operands() | case.cotangents()
    zeros = {
        "out": np.zeros(given["out_grad"].shape, case.dtype),
        "lse": np.zeros((case.b, case.n, case.t), lse_dtype(case.dtype)),
    }
    given = poison_padding(forward_options, given | zeros, poison)

    def both(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        out, lse = call(xla.forward, forward_options, given, device)
        residuals = {"out": out + given["out"], "lse": lse + given["lse"]}
        gradients = call(xla.backward, options, given | residuals, device)
        return {
            "out": out,
            "lse": lse,
            **dict(zip(options.wanted.gradients, gradients, strict=True)),
        }

    results = jax.jit(both)({name: jnp.asarray(x) for name, x in given.items()})
    return {name: np.asarray(x) for name, x in results.items()}


def keep_mask(case: Case) -> np.ndarray | None:
    """The dropout mask that XLA draws in this case, bool [B, N, T, S]."""
    if not case.dropout:
        return None
    operands = case.operands()
    spec = spec_of(case.forward_options(), operands)

    def draw(key: jax.Array) -> jax.Array:
        head_keys = dropout_head_keys(spec, {"dropout_key": key})
        assert head_keys is not None
        return dropout_keep_mask(spec, head_keys, 0, case.t)

    return np.asarray(jax.jit(draw)(jnp.asarray(operands["dropout_key"])))


cached_run = lru_cache(run)


@lru_cache
def references(case: Case) -> tuple[Operands, Naive]:
    """The results of a case in float64 and by the naive computation."""
    args = case.forward_options(), case.operands() | case.cotangents(), keep_mask(case)
    return reference(*args), naive(*args)


def check(case: Case, got: Operands) -> None:
    """Check all errors against those of the naive computation in the same dtype."""
    expected, plain = references(case)
    assert set(got) == set(expected) == set(plain.results)
    slack = 1e-12 if case.dtype == "float64" else SLACK
    allowed = allowances(case.forward_options(), expected, plain, expected, slack)
    errors = {name: error(got[name], x) for name, x in expected.items()}
    assert {name: x for name, x in errors.items() if not x <= allowed[name]} == {}, allowed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_as_exact_as_naive_ones(case):
    check(case, run(case))


@pytest.mark.parametrize("name", ["plain_bf16", "everything_bf16", "lengths_bf16", "one_kv_head"])
def test_16_bit_products_are_exact_enough(name):
    check(BY_NAME[name], run(BY_NAME[name], OTHER))


@pytest.mark.parametrize("name", ["everything_lengths", "bias_infinite"])
def test_results_in_float64(name):
    with jax.enable_x64(True):
        check(case := replace(BY_NAME[name], dtype="float64"), run(case))


def test_results_in_float32_under_x64():
    with jax.enable_x64(True):
        check(BY_NAME["everything_segments"], run(BY_NAME["everything_segments"]))


def test_infinities_in_padding_reach_no_result():
    check(BY_NAME["everything_lengths"], run(BY_NAME["everything_lengths"], poison=np.inf))


@pytest.mark.parametrize("name", ["mask_dead_rows", "everything_lengths"])
def test_no_intermediate_is_nan(name):
    with jax.debug_nans(True):
        check(BY_NAME[name], run(BY_NAME[name], poison=0.0))


def limit_blocks(
    monkeypatch: pytest.MonkeyPatch, case: Case, batch: int, kv_heads: int, rows: int
) -> None:
    """Limit the blocks of a case to this size."""
    head_bytes = case.n // case.k * rows * case.s * 4
    monkeypatch.setattr(blocks, "ENOUGH_ROWS", rows)
    monkeypatch.setattr(blocks, "SCORE_BYTES", batch * kv_heads * head_bytes)
    plan = xla.plan(spec_of(case.forward_options(), case.operands()), CPU)
    assert plan.workspace_bytes == batch * kv_heads * head_bytes, plan


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_of_one_head_give_the_same_results(case, monkeypatch):
    """Parts of the batch, the heads and the rows; the last part of the rows is smaller."""
    limit_blocks(monkeypatch, case, 1, 1, min(4, case.t))
    check(case, run(case))


@pytest.mark.parametrize(
    ("name", "batch", "kv_heads", "rows"),
    [
        ("everything", 2, 2, 4),
        ("everything", 1, 2, 3),
        ("everything_lengths", 4, 2, 4),
        ("everything_lengths", 2, 2, 10),
        ("everything_segments", 2, 2, 4),
        ("bias_of_keys", 2, 2, 4),
        ("bias_of_queries", 1, 2, 10),
        ("bias_of_batch", 1, 2, 4),
        ("dropout_keys_lse_grad", 1, 2, 10),
        ("sinks_of_batch", 2, 2, 1),
    ],
)
def test_larger_blocks_give_the_same_results(name, batch, kv_heads, rows, monkeypatch):
    limit_blocks(monkeypatch, BY_NAME[name], batch, kv_heads, rows)
    check(BY_NAME[name], run(BY_NAME[name]))


@pytest.mark.parametrize("shape", [(1, 4, 10, 14), (4, 1, 10, 14), (1, 1, 10, 14)])
def test_gradient_of_a_16_bit_bias_shared_by_blocks(shape, monkeypatch):
    """The sum over blocks is rounded once, so the size of a block has no effect."""
    case = Case("shared", b=4, bias=shape, bias_dtype="bfloat16")
    whole = run(case)["bias"]
    limit_blocks(monkeypatch, case, 1, 1, 4)
    np.testing.assert_allclose(np.float32(run(case)["bias"]), np.float32(whole), rtol=2**-7)


def test_every_score_is_in_exactly_one_block(monkeypatch):
    monkeypatch.setattr(blocks, "ENOUGH_ROWS", 3)
    case = Case("any", b=6, t=10, n=8, k=4, s=5)
    spec = spec_of(case.forward_options(), case.operands())
    for batch, kv_heads, rows in itertools.product((1, 2, 3, 6), (1, 2, 4), (3, 4, 10)):
        sizes = BlockSizes(batch, kv_heads, rows)
        for batch_is_inner in (False, True):

            def step(block: Block, seen: jax.Array) -> jax.Array:
                return block.add(seen, jnp.ones([block.sizes[x] for x in "bnt"]), "bnt")

            seen = for_each_block(
                step, jnp.zeros((6, 8, 10)), spec, sizes, batch_is_inner=batch_is_inner
            )
            np.testing.assert_array_equal(seen, 1)


def sizes_of(b: int, t: int, s: int, n: int, k: int) -> BlockSizes:
    shapes = {"query": (b, t, n, 64), "key": (b, s, k, 64), "value": (b, s, k, 64)}
    operands = {x: jax.ShapeDtypeStruct(y, jnp.bfloat16) for x, y in shapes.items()}
    return BlockSizes.of(spec_of(Case("any").forward_options(), operands))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 100, 300, 4, 2), (2, 2, 100)),  # dense
        ((1, 8192, 8192, 8, 8), (1, 8, 512)),  # parts of rows only
        ((32, 8192, 8192, 2, 1), (16, 1, 128)),  # then parts of the batch
        ((31, 8192, 8192, 2, 1), (1, 1, 2048)),  # 31 has no suitable divisor
        ((32, 8192, 8192, 128, 16), (1, 4, 128)),  # then parts of heads
        ((4096, 100, 8192, 32, 8), (1, 8, 100)),  # fewer than enough rows
        ((1, 2**18, 2**18, 8, 1), (1, 1, 16)),  # 16 rows of 8 heads
        ((2, 4, 2**26, 1, 1), (1, 1, 1)),  # a single row can be too large
    ],
)  # fmt: skip
def test_block_sizes(shape, expected):
    assert sizes_of(*shape) == BlockSizes(*expected)


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (32, 8), (64, 1), (128, 128)])
def test_blocks_have_enough_rows_for_any_batch(heads):
    for b in (1, 2, 3, 31, 32, 1000, 2**16):
        sizes = sizes_of(b, 8192, 8192, *heads)
        group = heads[0] // heads[1]
        assert sizes.rows >= 128 or group * sizes.rows >= 2048
        assert sizes.batch * sizes.kv_heads * group * sizes.rows * 8192 * 4 <= blocks.SCORE_BYTES


def test_plan_describes_the_blocks():
    def engine(b: int, t: int, n: int, k: int) -> str:
        shapes = {"query": (b, t, n, 64), "key": (b, 8192, k, 64), "value": (b, 8192, k, 64)}
        operands = {x: jax.ShapeDtypeStruct(y, jnp.bfloat16) for x, y in shapes.items()}
        return xla.plan(spec_of(Case("any").forward_options(), operands), CPU).engine

    assert engine(1, 128, 8, 8) == "dense"
    assert engine(1, 8192, 8, 8) == "16 x 512 query rows"
    assert engine(32, 8192, 8, 8) == "64 x 128 query rows, in 8 parts of 4 batch rows, 8 heads"
    assert engine(32, 128, 128, 16) == "1 x 128 query rows, in 128 parts of 1 batch rows, 32 heads"


@pytest.mark.parametrize("gradient", ["query", "key", "value", "bias", "alibi_slopes", "sinks"])
def test_each_gradient_can_be_computed_alone(gradient):
    case = BY_NAME["everything"]
    together = cached_run(case)
    given = case.operands() | case.cotangents() | {x: together[x] for x in ("out", "lse")}
    options = case.backward_options((gradient,))
    (alone,) = jax.jit(lambda given: call(xla.backward, options, given))(given)
    assert error(alone, together[gradient]) < 1e-5


def test_forward_pass_without_lse():
    case = BY_NAME["plain"]
    options = case.forward_options(needs_lse=False)
    (out,) = jax.jit(lambda given: call(xla.forward, options, given))(case.operands())
    assert error(out, cached_run(case)["out"]) < 1e-6


@pytest.mark.parametrize("axis", ["b", "t", "s", "n"])
def test_empty_arrays_give_zeros(axis):
    sizes: dict[str, Any] = {axis: 0} | ({"k": 0} if axis == "n" else {})
    case = Case("empty", **sizes, is_causal=True, sinks=1, alibi=1, lse_grad=True)
    got = run(case)
    assert not got["out"].any()
    assert (got["lse"] == -np.inf).all()
    assert not any(got[name].any() for name in case.differentiable)
    assert xla.plan(spec_of(case.forward_options(), case.operands()), CPU).workspace_bytes == 0


def test_integer_arrays_give_a_reason():
    case = BY_NAME["plain"]
    operands = {name: np.zeros(x.shape, np.int8) for name, x in case.operands().items()}
    (reason,) = xla.not_supported_reasons(spec_of(case.forward_options(), operands), CPU)
    assert "int8" in str(reason)
    assert xla.unusable_reason(CPU) == ""
