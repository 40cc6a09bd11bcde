"""Head dims padded to those of an ASM kernel, where CK is not built."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.call import widened
from attn_dispatch.aiter.kernels import not_supported_reasons
from attn_dispatch.aiter.release import DEV18, Release
from tests.support.aiter_dispatch import grid
from tests.support.aiter_public import assert_close, value_and_gradients

NEWEST = Release("v0.1.15", (0, 1, 20))
CALL = next(x for x in grid.calls() if not x.is_group)
WIDTHS = {
    ("gfx942", "forward"): {
        (64, 64): (128, 128), (8, 128): (128, 128), (128, 128): (128, 128), (136, 64): (192, 128),
        (192, 128): (192, 128), (64, 136): (64, 136), (256, 256): (256, 256),
    },
    ("gfx942", "backward"): {
        (32, 32): (64, 64), (64, 64): (64, 64), (72, 96): (96, 96), (192, 128): (192, 192),
        (200, 64): (200, 64),
    },
    ("gfx950", "backward"): {
        (32, 32): (72, 72), (64, 64): (72, 72), (96, 64): (96, 96), (128, 128): (128, 128),
        (136, 128): (192, 128), (192, 128): (192, 128), (136, 136): (136, 136),
    },
}  # fmt: skip


WINDOWS = {(32, 32): (72, 72), (64, 64): (72, 72), (96, 64): (96, 96), (160, 64): (160, 64)}


def test_windows_have_kernels_from_72_to_128():
    call = replace(CALL, backward=True, mask="bottom_right", window_left=40, window_right=0)
    for dims, expected in WINDOWS.items():
        found = widened(replace(call, head_dim=dims[0], head_dim_v=dims[1]), "gfx942", NEWEST)
        assert (found.head_dim, found.head_dim_v) == expected, dims
        reasons = [x.rule for x in not_supported_reasons(found, "gfx942", NEWEST)]
        assert ("aiter/asm_backward_window_head_dims" in reasons) == (dims[0] == 160), reasons


@pytest.mark.parametrize(("arch", "direction"), WIDTHS, ids=" ".join)
def test_head_dims_become_the_least_that_a_kernel_has(arch: str, direction: str):
    call = replace(CALL, backward=direction == "backward")
    for dims, expected in WIDTHS[arch, direction].items():
        asked = replace(call, head_dim=dims[0], head_dim_v=dims[1])
        assert widened(asked, arch, DEV18) == asked
        found = widened(asked, arch, NEWEST)
        assert (found.head_dim, found.head_dim_v) == expected, dims
        assert replace(found, head_dim=dims[0], head_dim_v=dims[1]) == asked


def test_packed_backward_calls_have_no_kernel_for_192_on_gfx950():
    call = replace(CALL, backward=True, is_group=True, head_dim=136, head_dim_v=128)
    assert widened(call, "gfx950", NEWEST) == call


def test_packed_sequences_of_equal_lengths_run_from_the_bottom_right(emulator, monkeypatch):
    """The same ids for queries and keys; forward kernels have no other diagonal."""
    monkeypatch.setattr(aiter_folder, "release", lambda arch: NEWEST)
    emulator.set_generation(NEWEST.generation)
    rng = np.random.default_rng(9)
    arrays = [jnp.asarray(rng.standard_normal((2, 32, 2, 128)), jnp.bfloat16) for _ in range(3)]
    ids = np.repeat([[1, 2, 2, 4], [0, 1, 1, 3]], 8, axis=1)
    options = {"query_segment_ids": ids, "key_value_segment_ids": ids, "max_segments": 4}
    got = value_and_gradients(*arrays, is_causal=True, **options)
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 1)
    assert emulator.last_call("forward").call.mask == 2
    expected = value_and_gradients(*arrays, is_causal=True, **options, implementation="xla")
    assert_close(got, expected)


@pytest.mark.parametrize("dims", [(64, 64), (36, 80)], ids=str)
def test_padded_calls_run_on_asm_both_ways(emulator, monkeypatch, dims: tuple[int, int]):
    monkeypatch.setattr(aiter_folder, "release", lambda arch: NEWEST)
    emulator.set_generation(NEWEST.generation)
    rng = np.random.default_rng(8)
    shapes = ((2, 24, 4, dims[0]), (2, 40, 2, dims[0]), (2, 40, 2, dims[1]))
    arrays = [jnp.asarray(rng.standard_normal(x), jnp.bfloat16) for x in shapes]
    got = value_and_gradients(*arrays)
    assert (emulator.calls("forward"), emulator.calls("backward")) == (1, 1)
    call = emulator.last_call("forward").call
    assert (call.use_asm, call.head_dim, call.head_dim_v) == (1, 128, 128)
    assert not emulator.last_call("backward").is_deterministic
    assert_close(got, value_and_gradients(*arrays, implementation="xla"))
