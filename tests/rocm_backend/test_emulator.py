"""The AITER emulator alone, which other tests rely on, compared with the float64 reference."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from tests.support.emulator import build
from tests.support.emulator.cases import CASES, DTYPES, FORWARD_CASES, RNG_STATE, Case, Run
from tests.support.emulator.native import CONSTANTS, Backward, Emulator, Forward, Refused


@pytest.fixture(scope="module")
def library():
    return Emulator(build.build("emulator_selftest", [*build.SOURCES, build.SELFTEST]))


@pytest.fixture
def emulator(library):
    yield library
    library.reset()
    library.library.attn_emulator_clear_buffers()


def _assert_close(actual: np.ndarray, expected: np.ndarray, case: Case, factor: float = 1) -> None:
    eps = {"float16": 2**-10, "bfloat16": 2**-7}[case.dtype]
    np.testing.assert_allclose(
        np.asarray(actual, float), expected, rtol=2 * eps * factor, atol=eps * factor
    )


@pytest.mark.parametrize("name", FORWARD_CASES)
def test_the_forward_pass_agrees_with_the_reference(emulator, name):
    case = FORWARD_CASES[name]
    run = Run(case, emulator)
    run.run(run.forward_call())
    written = np.zeros(run.views["out"].shape, bool)
    for index, (q, _, lse) in enumerate(run.sequences()):
        expected = run.expected(index)
        _assert_close(run.views["out"][q], expected["out"], case)
        np.testing.assert_allclose(run.views["lse"][lse], expected["lse"], rtol=1e-4, atol=1e-4)
        written[q] = True
    assert np.isnan(run.views["out"].astype(float)[~written]).all()
    untouched = run.buffers["out"].astype(float)
    assert np.isnan(untouched).sum() == untouched.size - written.sum()


@pytest.mark.parametrize("name", CASES)
def test_the_backward_pass_agrees_with_the_reference(emulator, name):
    case = CASES[name]
    run = Run(case, emulator)
    run.run(run.forward_call())
    run.run(run.backward_call())
    for index, (q, k, _) in enumerate(run.sequences()):
        expected = run.expected(index)
        factor = 4 if case.accumulator == "ATOMIC_16" else 2
        _assert_close(run.views["dq"][q], expected["query"], case, factor)
        for gradient, operand in (("dk", "key"), ("dv", "value")):
            actual = run.views[gradient][k].astype(float)
            shape = (len(actual), case.kv_heads, case.heads // case.kv_heads, actual.shape[-1])
            _assert_close(actual.reshape(shape).sum(2), expected[operand], case, 4)
        if case.bias == "BIAS":
            dbias = np.swapaxes(expected["bias"], 0, 1)
            _assert_close(run.views["dbias"][q][..., : dbias.shape[-1]], dbias, case, 4)
    if case.is_group:
        assert np.isnan(run.views["dq"][int(run.starts_q[-1]) :].astype(float)).all()
        assert np.isnan(run.views["dk"][int(run.starts_k[-1]) :].astype(float)).all()


@pytest.mark.parametrize("name", ["atomic 32", "atomic 32 packed", "atomic 16", "atomic 16 packed"])
def test_dq_acc_holds_dq_in_the_layout_of_its_kernel(emulator, name):
    case = CASES[name]
    run = Run(case, emulator)
    run.run(run.forward_call())
    run.run(run.backward_call())
    expected = np.zeros(run.views["dq_acc"].shape)
    for index, (q, _, rows) in enumerate(run.sequences()):
        dq = np.swapaxes(run.views["dq"][q].astype(float), 0, 1)
        if case.accumulator == "ATOMIC_16":
            expected[index, :, : dq.shape[1], : case.dim] = dq
        else:
            expected[rows] = dq
    _assert_close(run.views["dq_acc"], expected, case)


@pytest.mark.parametrize("name", ["dense", "deterministic packed", "atomic 32", "atomic 16"])
def test_dq_acc_must_be_zero_before_the_backward_pass(emulator, name):
    run = Run(CASES[name], emulator)
    run.run(run.forward_call())
    run.buffers["dq_acc"][...] = np.nan
    run.run(run.backward_call())
    assert np.isnan(run.views["dq"].astype(float)).any()


def test_16_bit_atomics_add_to_dq(emulator):
    run = Run(CASES["atomic 16 direct"], emulator)
    run.run(run.forward_call())
    run.buffers["dq_acc"][...] = np.nan
    run.run(run.backward_call())
    first = run.views["dq"].astype(float)
    assert np.isfinite(first).all()
    run.run(run.backward_call())
    _assert_close(run.views["dq"], 2 * first, run.case, 4)


def test_sequences_without_keys_or_queries_show_the_bugs_of_dev18(emulator):
    """dev18 has two bugs, which the front end must avoid."""
    lengths = {"query_lengths": (5, 0, 4), "key_lengths": (6, 7, 0)}
    run = Run(replace(CASES["packed"], **lengths), emulator)
    run.run(run.forward_call())
    last = run.sequences()[2][0]
    assert (run.views["out"][last] == 0).all()
    assert (run.views["lse"][:, last] == -np.inf).all()
    run.run(run.backward_call())
    assert (run.views["dq"][last] == 0).all()
    keys = run.sequences()[1][1]
    assert np.isnan(run.views["dk"][keys].astype(float)).all()
    assert np.isnan(run.views["dv"][keys].astype(float)).all()
    forward = run.forward_call()
    forward.call.use_asm = 1
    run.run(forward)
    assert np.isnan(run.views["out"][last].astype(float)).all()


def test_rows_hidden_by_bias_alone_are_nan(emulator):
    run = Run(CASES["bias"], emulator)
    run.views["bias"][0, 1, 2] = -np.inf
    run.run(run.forward_call())
    assert np.isnan(run.views["out"][0, 1, 2].astype(float)).all()
    assert run.views["lse"][0, 2, 1] == -np.inf
    masked = Run(CASES["masked bias"], emulator)
    masked.views["bias"][0, 1, 2] = -np.inf
    masked.run(masked.forward_call())
    assert (masked.views["out"][0, 1, 2] == 0).all()


ARRAYS = ("q", "k", "v", "bias", "out", "lse", "out_grad", "dq", "dk", "dv", "dbias", "softmax_d")


@pytest.mark.parametrize("name", [*ARRAYS, "dq_acc", "seqstart_q", "seqlen_k", "rng_state"])
def test_a_buffer_that_is_too_small_is_refused(emulator, name):
    case = replace(CASES["packed bias"], dropout=0.2, layout="bthd")
    run = Run(case, emulator)
    short = run.buffers[name].reshape(-1)[:-1]
    run.buffers[name] = short
    size = short.nbytes
    with pytest.raises(Refused, match=rf"^{name}: .* need \d+ bytes and its buffer has {size}$"):
        run.run(run.backward_call())


@pytest.mark.parametrize(
    ("sentence", "change"),
    [
        ("dk overlaps dv", lambda b: setattr(b, "dv", b.dk)),
        ("dk overlaps itself", lambda b: setattr(b, "nhead_stride_dk", 0)),
        ("negative", lambda b: setattr(b.call, "stride_k", -8)),
        ("dq points into no buffer", lambda b: setattr(b, "dq", b.dq + (1 << 40))),
        ("0 in group mode", lambda b: setattr(b.call, "batch_stride_q", 8)),
        ("together", lambda b: setattr(b.call, "seqlen_q", None)),
        ("more than max_seq_len 2", lambda b: setattr(b.call, "max_seq_len_q", 2)),
        ("there are 7 rows", lambda b: setattr(b.call, "seq_len_q", 7)),
        ("seqlen_q and seqlen_k", lambda b: setattr(b.call, "use_asm", 1)),
        ("CK does not know", lambda b: setattr(b, "accumulator", 1)),
        ("needs a mask kind", lambda b: setattr(b.call, "window_left", 3)),
        ("multiple of 8", lambda b: setattr(b.call, "head_dim", 12)),
    ],
)
def test_a_wrong_call_is_refused(emulator, sentence, change):
    run = Run(CASES["packed with gaps"], emulator)
    backward = run.backward_call()
    change(backward)
    with pytest.raises(Refused, match=sentence):
        run.run(backward)


def test_other_layouts_of_dq_acc_and_missing_kernels_are_refused(emulator):
    run = Run(CASES["atomic 16"], emulator)
    backward = run.backward_call()
    backward.nhead_stride_dq_acc -= 128
    with pytest.raises(Refused, match="the ASM kernel knows it as rows of 128"):
        run.run(backward)
    forward = Run(CASES["bias"], emulator).forward_call()
    forward.logits_soft_cap = 5
    with pytest.raises(Refused, match="soft cap and a bias"):
        emulator.run(forward)


def test_sequences_out_of_order_are_refused(emulator):
    run = Run(CASES["packed"], emulator)
    run.views["seqstart_k"][1:3] = (7, 6)
    with pytest.raises(Refused, match=r"seqstart_k decreases after \[1\]"):
        run.run(run.forward_call())


def test_dropout_depends_on_indices_and_seed_alone(emulator):
    keep = emulator.keep(RNG_STATE, 0.4, (2, 3, 20, 20))
    assert abs(keep.mean() - 154 / 256) < 0.04  # floor(0.6 * 255) is 153, and it is kept
    assert (keep[:1, :2, :4, :5] == emulator.keep(RNG_STATE, 0.4, (1, 2, 4, 5))).all()
    assert (keep != emulator.keep((RNG_STATE[0], 8), 0.4, keep.shape)).any()


def test_hooks_control_the_emulator_and_record_calls(emulator):
    run = Run(CASES["dense"], emulator)
    forward = run.forward_call()
    assert emulator.generation == "dev18"
    assert emulator.api_version == CONSTANTS["API_VERSION"]
    assert emulator.device_arch() == "gfx942"
    assert not emulator.takes_asm(forward)
    emulator.set_asm_answer(1)
    assert emulator.takes_asm(forward)
    assert emulator.last_call("forward") is None
    emulator.fail_next("no more memory")
    with pytest.raises(Refused, match="no more memory"):
        run.run(forward)
    run.run(forward)
    assert emulator.calls("forward") == 2
    assert emulator.calls("backward") == 0
    last = emulator.last_call("forward")
    assert bytes(last) == bytes(forward)
    memory = np.ones(4, np.uint8)
    emulator.fail_next("no stream")
    arguments = (memory.ctypes.data_as(ctypes.c_void_p), 0, ctypes.c_size_t(3), None)
    error = emulator.library.hipMemsetAsync(*arguments)
    emulator.library.hipGetErrorString.restype = ctypes.c_char_p
    assert emulator.library.hipGetErrorString(error) == b"no stream"
    assert emulator.library.hipMemsetAsync(*arguments) == 0
    assert memory.tolist() == [0, 0, 0, 1]


def test_16_bit_floats_are_converted_as_in_numpy(library):
    """Values, and the rounding of floats between them, agree with NumPy and ml_dtypes."""
    native = library.library
    native.selftest_load.restype = ctypes.c_float
    native.selftest_store.restype = ctypes.c_uint16
    assert native.selftest_forward_size() == ctypes.sizeof(Forward)
    assert native.selftest_backward_size() == ctypes.sizeof(Backward)
    bits = np.arange(0, 1 << 16, 7, dtype=np.uint16)
    for number, dtype in enumerate(DTYPES.values()):
        values = bits.view(dtype).astype(np.float32)
        loaded = np.array([native.selftest_load(int(x), number) for x in bits], np.float32)
        np.testing.assert_array_equal(loaded, values)
        between = values[np.isfinite(values)]
        between = np.concatenate([between * np.float32(1 + 2**-x) for x in (9, 12)])
        stored = [native.selftest_store(ctypes.c_float(x), number, 0) for x in between]
        with np.errstate(over="ignore"):
            expected = between.astype(dtype)
        np.testing.assert_array_equal(
            np.array(stored, np.uint16).view(dtype).astype(np.float32), expected.astype(np.float32)
        )
    halfway = ctypes.c_float(1 + 2**-8)  # between two bfloat16, the lower one even
    rounded = [native.selftest_store(halfway, CONSTANTS["BF16"], x) for x in range(3)]
    assert rounded == [0x3F80, 0x3F81, 0x3F80]
