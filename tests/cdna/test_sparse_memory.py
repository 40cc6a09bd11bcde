"""Arrays of GiB on AITER's machine code: right below 4 GiB, and wrong beyond, as a rule says."""

from __future__ import annotations

import pytest

from attn_dispatch.aiter.sizes import MOST_BYTES_OF_A_ROW
from tests.support.cdna import generations
from tests.support.cdna.sparse import GIB, Far, SparseCall

BELOW = Far(batch=int(1.3 * GIB) // 256 * 256, sequences=3)
BEYOND = Far(batch=3 * GIB, sequences=3)
LONG = Far(row=2**22, sequences=1, queries=700, keys=690)
"""One batch row of 2.7 GiB."""
TOO_LONG = Far(row=2**22, sequences=1, queries=1100, keys=1090)


def _wrong(generation: str, arch: str, far: Far, *, backward: bool) -> str:
    if missing := generations.missing(generation):
        pytest.skip(missing)
    with generations.gpu_of(generation, arch) as gpu:
        return SparseCall(far, generation, backward=backward).run(gpu)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("arch", generations.ARCHS)
@pytest.mark.parametrize("generation", generations.GENERATIONS)
def test_batch_rows_below_4_gib_are_right(generation: str, arch: str, backward: bool):
    assert _wrong(generation, arch, BELOW, backward=backward) == ""


@pytest.mark.parametrize("backward", [False, True])
def test_one_row_below_4_gib_is_right_and_one_beyond_is_wrong(backward: bool):
    assert _wrong("dev18", "gfx942", LONG, backward=backward) == ""
    assert "is wrong by" in _wrong("dev18", "gfx942", TOO_LONG, backward=backward)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("arch", generations.ARCHS)
def test_batch_rows_beyond_4_gib_are_wrong_in_dev18(arch: str, backward: bool):
    """Offsets of batch rows are multiplied in 32 bits: the rule on 4 GiB is needed."""
    assert "is wrong by" in _wrong("dev18", arch, BEYOND, backward=backward)


@pytest.mark.parametrize("generation", generations.GENERATIONS)
def test_long_rows_forward_on_gfx950_need_their_rule(generation: str):
    def far(row: int) -> Far:
        return Far(row=row, sequences=1, queries=300, keys=290)

    assert _wrong(generation, "gfx950", far(MOST_BYTES_OF_A_ROW), backward=False) == ""
    found = _wrong(generation, "gfx950", far(2 * MOST_BYTES_OF_A_ROW), backward=False)
    assert "is wrong by" in found
