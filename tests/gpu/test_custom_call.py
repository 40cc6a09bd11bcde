"""cuDNN's custom call, called directly and from exported modules, right and wrong."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import cudnn
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch.devices import clear_rows
from attn_dispatch.devices.target import default_device
from attn_dispatch_tools.verify.case import spec_of
from tests.support.exported_case import CASE, arrays, attend
from tests.support.repository import environment


def call_directly(operands=None, out=None, workspace_bytes=1 << 20, **changes):
    """Run the forward custom call with some operands, results or attributes changed."""
    spec = spec_of(CASE.forward_options(needs_lse=False), CASE.operands())
    q, k, v = arrays() if operands is None else operands
    attributes = cudnn._ffi_attributes(variants_of(spec)[0])
    results = [
        jax.ShapeDtypeStruct((CASE.b, CASE.t, CASE.n, CASE.v) if out is None else out, q.dtype),
        jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8),
    ]
    cudnn.register()
    call = jax.ffi.ffi_call(cudnn.FORWARD_TARGET, results)
    return jax.block_until_ready(
        jax.jit(lambda q, k, v: call(q, k, v, **(attributes | changes)))(q, k, v)
    )


def test_a_direct_call_gives_the_result_of_the_public_call():
    np.testing.assert_array_equal(call_directly()[0], jax.jit(attend)(*arrays()))


def test_a_workspace_that_is_too_small_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="lower it again here"):
        call_directly(workspace_bytes=0)


def test_an_operand_of_wrong_size_is_refused():
    q, k, v = arrays()
    with pytest.raises(jax.errors.JaxRuntimeError, match="buffer 1, key: expected"):
        call_directly(operands=(q, k[:, :128], v))


def test_a_result_of_wrong_size_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="buffer 3, out: expected"):
        call_directly(out=(1, CASE.t, CASE.n, CASE.v))


def test_operands_and_results_are_counted_separately():
    """The sum of operands and results is right, but not each number."""
    q, k, v = arrays()
    spec = spec_of(CASE.forward_options(needs_lse=False), CASE.operands())
    attributes = cudnn._ffi_attributes(variants_of(spec)[0])
    cudnn.register()
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    workspace = jax.ShapeDtypeStruct((1 << 20,), jnp.uint8)
    for operands, results in (((q, k), [out, out, workspace]), ((q, k, v, q), [workspace])):
        call = jax.ffi.ffi_call(cudnn.FORWARD_TARGET, results)
        expected = "expected 3 operands, 1 results and a workspace"
        with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
            jax.block_until_ready(jax.jit(lambda *x, call=call: call(*x, **attributes))(*operands))


@pytest.mark.parametrize("count", [28, 62])
def test_a_score_mod_may_read_many_arrays(count):
    """There are more buffers than fit into the array for pointers of an ordinary call."""
    q, k, v = arrays()
    rng = np.random.default_rng(5)
    factors = [jnp.asarray(rng.uniform(0.98, 1.02, CASE.n), jnp.float32) for _ in range(count)]

    def score_mod(score, b, n, t, s):
        for factor in factors:
            score = score * factor[n]
        return score

    def attention(implementation):
        return jax.jit(
            lambda q, k, v: attn_dispatch.dot_product_attention(
                q, k, v, score_mod=score_mod, implementation=implementation
            )
        )(q, k, v).astype(jnp.float32)

    np.testing.assert_allclose(attention("cudnn"), attention("xla"), atol=2e-2)


@pytest.mark.parametrize(
    ("rows", "flags", "result"),
    [((8, 64), 8, (4, 64)), ((8, 64), 3, (8, 64)), ((8, 4), 8, (8, 4)), ((8, 64), 0, (8, 64))],
)
def test_clear_rows_refuses_shapes_that_contradict_each_other(rows, flags, result):
    """The cases: a smaller result, flags that do not divide the rows, rows of 8 bytes, no flags."""
    clear_rows.register()
    call = jax.ffi.ffi_call(clear_rows.TARGET, jax.ShapeDtypeStruct(result, jnp.bfloat16))
    operands = jnp.ones(rows, jnp.bfloat16), jnp.ones(flags, jnp.uint8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="attn_dispatch_clear_rows: expected"):
        jax.block_until_ready(jax.jit(call)(*operands))


@pytest.mark.parametrize("number", [1, 4])
def test_clear_rows_clears_several_arrays(number):
    """Padding in one place, in all of a block, and in the last rows; invalid rows become NaN."""
    clear_rows.register()
    rows, heads = (1, 40, 300, 8192)[:number], (8, 1, 3, 16)[:number]
    flags = [np.ones(n, np.uint8) for n in rows]
    for x in flags:
        x[: x.size // 3], x[x.size // 2 : x.size // 2 + 1], x[-1] = 0, 2, 0
    arrays = [jnp.ones((n, h, 128), jnp.bfloat16) for n, h in zip(rows, heads, strict=True)]

    @jax.jit
    def clear(arrays, flags):
        return clear_rows.cleared_together(*zip(arrays, flags, strict=True))

    for found, x in zip(clear(arrays, [jnp.asarray(x) for x in flags]), flags, strict=True):
        expected = np.array([0, 1, np.nan], np.float32)[x][:, None, None]
        # NumPy knows no NaN of bfloat16.
        found = np.asarray(found, np.float32)
        np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


def test_clear_rows_refuses_too_many_arrays():
    clear_rows.register()
    many = clear_rows.MOST_ARRAYS + 1
    x, flags = jnp.ones((8, 64), jnp.bfloat16), jnp.ones(8, jnp.uint8)
    call = jax.ffi.ffi_call(clear_rows.TARGET, [jax.ShapeDtypeStruct(x.shape, x.dtype)] * many)
    with pytest.raises(jax.errors.JaxRuntimeError, match="attn_dispatch_clear_rows: expected 1 to"):
        jax.block_until_ready(jax.jit(call)(*[x] * many, *[flags] * many))


@pytest.mark.parametrize("invalid_is_nan", [False, True])
@pytest.mark.parametrize("offsets", [(0, 7, 5000), (0, 0, 0), (0, 9, 8191), (8192,) * 3])
def test_clear_ends_clears_rows_past_the_last_sequence(offsets, invalid_is_nan):
    """By the kernel as by XLA, in arrays of several rows, and in lse."""
    clear_rows.register()
    arrays = [jnp.ones((8192, n, 64), jnp.bfloat16) for n in (32, 8, 1)]
    lse = jnp.ones((32, 8192), jnp.float32)

    def program(function):
        @jax.jit
        def clear(offsets, arrays, lse):
            return function(offsets, arrays, lse, invalid_is_nan=invalid_is_nan)

        return clear(jnp.asarray(offsets, jnp.int32), arrays, lse)

    pairs = map(program, (clear_rows.ends_cleared, clear_rows._ends_cleared_by_xla))
    for x, y in zip(*pairs, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize(
    ("array", "offsets", "result"),
    [
        (((8, 64), jnp.bfloat16), ((3,), jnp.int32), (4, 64)),
        (((8, 1), jnp.bfloat16), ((3,), jnp.int32), (8, 1)),
        (((8, 64), jnp.bfloat16), ((3,), jnp.uint8), (8, 64)),
        (((8, 64), jnp.bfloat16), ((0,), jnp.int32), (8, 64)),
    ],
)
def test_clear_ends_refuses_shapes_that_contradict_each_other(array, offsets, result):
    """The cases: a smaller result, rows of 2 bytes, offsets of another type, no offsets."""
    clear_rows.register()
    operands = [jnp.ones(*x) for x in (array, offsets)]
    call = jax.ffi.ffi_call(clear_rows.ENDS_TARGET, jax.ShapeDtypeStruct(result, jnp.bfloat16))
    attributes = {"has_lse": False, "invalid_is_nan": True}
    with pytest.raises(jax.errors.JaxRuntimeError, match="attn_dispatch_clear_ends: expected"):
        jax.block_until_ready(jax.jit(lambda *x: call(*x, **attributes))(*operands))


def test_wrong_attributes_are_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="unknown surplus"):
        call_directly(surplus=np.int64(1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="num_heads: expected a multiple of"):
        call_directly(num_kv_heads=np.int64(3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="dtype: expected float16 or bfloat16"):
        call_directly(dtype="float32")


@pytest.mark.parametrize("target", ["here", "sm90"])
def test_exported_module_runs_in_a_new_process(target, tmp_path, record):
    """The module may be lowered for a device known only by its properties."""
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in (cudnn.FORWARD_TARGET, cudnn.BACKWARD_TARGET)
    ]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays()]
    targets = () if target == "here" else (target,)
    with attn_dispatch.target(*targets):
        exported = jax.export.export(
            jax.jit(attend), platforms=("cuda", "cpu"), disabled_checks=checks
        )(*shapes)
    (tmp_path / "module").write_bytes(exported.serialize())
    code = """
        import pathlib, sys
        import attn_dispatch, jax, numpy as np
        from tests.support.exported_case import arrays
        attn_dispatch.register_cudnn_calls()
        module = jax.export.deserialize(pathlib.Path(sys.argv[1]).read_bytes())
        np.save(sys.argv[2], np.asarray(module.call(*arrays()), np.float32))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path / "module", tmp_path / "out.npy"],
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    expected = np.asarray(jax.jit(attend)(*arrays()), np.float32)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)
    record(target=target, device=str(default_device()))
