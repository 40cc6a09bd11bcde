"""The emulator's split-KV call compared with the float64 reference."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from tests.support.emulator import build
from tests.support.emulator.native import Emulator, Refused, SplitKv
from tests.support.emulator.split_kv_cases import SPLIT_CASES, SplitRun


@pytest.fixture(scope="module")
def library():
    return Emulator(build.build("emulator_selftest", [*build.SOURCES, build.SELFTEST]))


@pytest.fixture
def emulator(library):
    yield library
    library.reset()
    library.library.attn_emulator_clear_buffers()


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_split_kv_agrees_with_the_reference(emulator, name):
    case = SPLIT_CASES[name]
    run = SplitRun(case, emulator)
    run.run(run.call())
    eps = {"float16": 2**-10, "bfloat16": 2**-7}[case.dtype]
    for row in range(len(case.lengths)):
        expected = run.expected(row)
        out = run.views["out"][row].astype(float)
        np.testing.assert_allclose(out, expected["out"], rtol=2 * eps, atol=eps)
        np.testing.assert_allclose(run.views["lse"][row], expected["lse"], rtol=1e-4, atol=1e-4)
    for name in ("out", "lse", "lse_acc", "out_acc"):
        view, buffer = (x[name].astype(float) for x in (run.views, run.buffers))
        # Nothing outside of the view is written.
        assert np.isnan(buffer).sum() == buffer.size - view.size, name
    assert emulator.calls("split_kv") == 1
    assert bytes(emulator.last_call("split_kv")) == bytes(run.call())


def test_splits_divide_the_keys_of_each_row(emulator):
    run = SplitRun(replace(SPLIT_CASES["rows"], lengths=(9, 2, 0, 1), splits=4), emulator)
    run.run(run.call())
    has_keys = np.isfinite(run.views["lse_acc"][:, 0, :, 0])
    assert has_keys.tolist() == [
        [True, True, True, False],  # 3, 3, 3 and none
        [True, True, False, False],
        [False] * 4,
        [True, False, False, False],
    ]
    assert (run.views["out_acc"][~np.isfinite(run.views["lse_acc"])] == 0).all()


NAMES = ("q", "k", "v", "bias", "seqlen_k", "page_table", "out", "lse", "lse_acc", "out_acc")


@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_that_is_too_small_is_refused(emulator, name):
    run = SplitRun(SPLIT_CASES["alibi"], emulator)
    view = run.views[name]
    shape = run.table.shape if name == "page_table" else view.shape
    reach = sum((n - 1) * x for n, x in zip(shape, view.strides, strict=True)) // view.itemsize
    run.buffers[name] = run.buffers[name].reshape(-1)[:reach]  # one element too few
    with pytest.raises(Refused, match=rf"^{name}: its shape and strides need \d+ bytes and its"):
        run.run(run.call())


@pytest.mark.parametrize(
    ("sentence", "change"),
    [
        ("129 splits", lambda s: setattr(s, "num_splits", 129)),
        ("0 splits", lambda s: setattr(s, "num_splits", 0)),
        ("pages of 64 keys", lambda s: setattr(s, "page_size", 64)),
        ("whole pages", lambda s: _set_keys(s, 200)),
        ("pages without a page table", lambda s: setattr(s, "page_table", None)),
        ("there are 1 pages", lambda s: setattr(s, "num_pages", 1)),
        ("without groups here", lambda s: setattr(s.call, "is_group", 1)),
        ("needs seqlen_k", lambda s: setattr(s.call, "seqlen_k", None)),
        ("no ASM kernels", lambda s: setattr(s.call, "use_asm", 1)),
        ("must equal seq_len_", lambda s: setattr(s.call, "max_seq_len_kv", 128)),
        ("scratch must be given", lambda s: setattr(s, "out_acc", None)),
        ("lse_acc overlaps itself", lambda s: setattr(s, "split_stride_lse_acc", 0)),
        ("out_acc overlaps itself", lambda s: setattr(s, "split_stride_out_acc", 8)),
        ("lse overlaps lse_acc", lambda s: setattr(s, "lse", s.lse_acc)),
        ("there is space for 128", lambda s: _set_keys(s, 128)),
        ("soft cap and a bias", lambda s: _set_alibi(s)),
        ("takes no bias here", lambda s: _set_bias(s)),
    ],
)
def test_a_wrong_call_is_refused(emulator, sentence, change):
    run = SplitRun(replace(SPLIT_CASES["pages"], soft_cap=0.5), emulator)
    split = run.call()
    change(split)
    with pytest.raises(Refused, match=sentence):
        run.run(split)


def _set_keys(split, keys: int) -> None:
    split.call.seq_len_kv = split.call.max_seq_len_kv = keys


def _set_alibi(split) -> None:
    split.call.bias, split.call.bias_kind = split.call.q, 2


def _set_bias(split) -> None:
    split.call.bias, split.call.bias_kind = split.call.q, 1


def test_the_struct_parsed_from_the_header_has_the_right_size(library):
    assert library.library.selftest_split_kv_size() == ctypes.sizeof(SplitKv)
