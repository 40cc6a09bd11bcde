"""What the handlers of compiled FlashAttention-4 check before a launch: every array's every fact.

Kernels trust their arguments, and have no way to report a wrong one. The arrays here are described
and have no memory: a pass that the checks accept fails at the driver, which refuses it.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.support import fa4_arrays, fa4_stand_in
from tests.support.fa4_arrays import Pass
from tests.support.fa4_emulated import Emulated
from tests.support.fa4_wrong_arrays import wrong_arrays

SET, WITHOUT_GROUPS = "sm90_d96_float16", "sm90_d192_128_bfloat16"
SHAPE = (3, 300, 500, 4, 2)
ALONE = (3, 300, 500, 4, 4)
_PASSES = {
    "forward": (False, SHAPE),
    "forward sinks": (False, SHAPE),
    "backward": (True, ALONE),
    "backward grouped": (True, SHAPE),
}
_FORMS = {"rows": None, "bits": 1, "bits by head": SHAPE[3]}
"""The forms of a mask, with the number of its heads."""
_WRONG = re.compile(r"[\w ',]+: expected .+, got .+")
_HUGE = re.compile(r"\w+: \w+ \[[\d, ]+\] is more than a process can address")


def made(
    fa4: Emulated,
    is_backward: bool,
    shape=SHAPE,
    name: str = SET,
    masks: int = 1,
    mask_heads: int | None = None,
    has_sinks: bool = False,
) -> Pass:
    (kernels,) = [x for x in fa4.library.sets if x.name == name]
    return fa4_arrays.made(
        kernels, shape, is_backward=is_backward, masks=masks, mask_heads=mask_heads,
        has_sinks=has_sinks,
    )  # fmt: skip


def outcome(fa4: Emulated, call: Pass) -> tuple[str, str]:
    """The kind of failure and its message; ("accepted", "") if the checks passed."""
    fa4.driver.fail("cuMemsetD8Async" if "key_sums" in call.results else "cuLaunchKernelEx")
    arrays = ([x.described for x in y.values()] for y in (call.operands, call.results))
    kind = (call.has_bits, call.has_sinks, call.is_backward)
    code, message = fa4.module.run(call.kernels.name, *kind, *arrays)
    fa4.driver.fail("")
    return ("accepted", "") if code == "device" else (code, message)


def _names(kind: str, form: str) -> list[str]:
    operands, is_forward = ["query", "key", "value"], kind.startswith("forward")
    if not is_forward:
        operands += ["lse", "out_grad", "lse_grad"]
    lists = [f"{x}_{y}" for x in ("partial", "full") for y in ("counts", "indices")]
    results = ["dq", "dk", "dv", "products", "lse2", "query_sums"]
    if kind == "backward grouped":
        results += ["key_sums", "value_sums"]
    if kind == "forward sinks":
        operands.append("sinks")
    return [*operands, *lists, form.split()[0], "out", *(["lse"] if is_forward else results)]


@pytest.mark.parametrize("masks", [1, SHAPE[0]])
@pytest.mark.parametrize(
    ("kind", "form", "name"),
    [(kind, form, name) for kind in _PASSES for form in _FORMS for name in _names(kind, form)],
)
def test_an_array_that_is_wrong_in_one_fact_is_refused(
    fa4, kind: str, form: str, name: str, masks: int
):
    is_backward, shape = _PASSES[kind]
    has_sinks = kind == "forward sinks"
    call = made(fa4, is_backward, shape, masks=masks, mask_heads=_FORMS[form], has_sinks=has_sinks)
    for array in wrong_arrays(name, call[name], shape[0], shape[3]):
        code, message = outcome(fa4, call.changed(**{name: array}))
        assert code == "wrong call", (array, code, message)
        assert _WRONG.fullmatch(message), (array, message)


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("kind", _PASSES)
def test_the_names_cover_all_arrays(fa4, kind: str, form: str):
    has_sinks = kind == "forward sinks"
    call = made(fa4, *_PASSES[kind], mask_heads=_FORMS[form], has_sinks=has_sinks)
    assert {*_names(kind, form)} == {*call.operands, *call.results}


def _variant(fa4: Emulated) -> str:
    """A set whose score_mod reads arrays of both types."""
    return next(x.name for x in fa4.library.sets if {*x.variant_arrays} == {*"fi"})


_MODS = [(False, False), (False, True), (True, False)]
"""Passes of a variant: whether backward, and whether with sinks."""


@pytest.mark.parametrize(("is_backward", "has_sinks"), _MODS)
def test_arrays_of_a_score_mod_are_checked(fa4, is_backward: bool, has_sinks: bool):
    call = made(fa4, is_backward, name=_variant(fa4), has_sinks=has_sinks)
    assert outcome(fa4, call) == ("accepted", "")
    for name in [x for x in call.operands if x.startswith("mod_")]:
        array = call[name]
        assert outcome(fa4, call.changed(**{name: array.with_extent(0, 1)}))[0] == "accepted"
        other = "int32" if array.dtype == "float32" else "float32"
        wrong = [array.changed(dtype=x) for x in (other, "float64", "float16")]
        wrong += [array.changed(bytes=array.described[3] + x) for x in (-1, 1)]
        wrong += [array.changed(shape=x) for x in ((), (1, 5), (0,), (-1,), (2**31,), (2**62,))]
        wrong += [array.changed(address=array.address + 2)]
        for one in wrong:
            code, message = outcome(fa4, call.changed(**{name: one}))
            assert code == "wrong call", (one, code, message)
            assert _WRONG.fullmatch(message), (one, message)


@pytest.mark.parametrize(("is_backward", "has_sinks"), _MODS)
def test_arrays_of_a_score_mod_are_counted(fa4, is_backward: bool, has_sinks: bool):
    call = made(fa4, is_backward, name=_variant(fa4), has_sinks=has_sinks)
    *_, last = call.operands
    without = {x: y for x, y in call.operands.items() if x != last}
    count = len(call.operands)
    for operands, got in ((without, count - 1), (call.operands | {"more": call[last]}, count + 1)):
        found = outcome(fa4, dataclasses.replace(call, operands=operands))
        assert found == ("wrong call", f"operands: expected {count}, got {got}")


@pytest.mark.parametrize("masks", [1, "batch"])
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(
    "shape",
    [SHAPE, ALONE, (1, 1, 1, 1, 1), (2, 129, 1, 8, 1), (1, 1, 700, 6, 3), (1, 1 << 20, 64, 2, 2)],
)
@pytest.mark.parametrize("form", _FORMS)
def test_right_arrays_are_accepted(fa4, shape, is_backward: bool, masks, form: str):
    count = 1 if masks == 1 else shape[0]
    heads = shape[3] if form == "bits by head" else _FORMS[form]
    call = made(fa4, is_backward, shape, masks=count, mask_heads=heads)
    assert outcome(fa4, call) == ("accepted", "")
    narrow = call["full_indices"].with_extent(3, 1)
    assert outcome(fa4, call.changed(full_indices=narrow)) == ("accepted", "")
    # Each array of a mask may have one row, or one for each batch row; and so for heads.
    name = form.split()[0]
    changed = [(name, 0, shape[0]), ("full_counts", 1, shape[3])]
    for array, axis, extent in [*changed, *([("bits", 1, shape[3])] if heads else [])]:
        for one in (1, extent):
            other = {array: call[array].with_extent(axis, one)}
            assert outcome(fa4, call.changed(**other)) == ("accepted", "")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"query": "bfloat16"}, "query: expected float16 [3, 300, 4, 96], got bfloat16 [3, "),
        ({"query": (0, 300, 4, 96)}, "batch: expected 1 to 65535, got 0"),
        ({"query": (65536, 300, 4, 96)}, "batch: expected 1 to 65535, got 65536"),
        ({"query": (3, 2**31 - 1, 4, 96)}, "query rows: expected 1 to 2147482623, got 2147483647"),
        ({"key": (3, 2**31, 2, 96)}, "keys: expected 1 to 2147482623, got 2147483648"),
        ({"query": (3, 300, 70000, 96)}, "query heads: expected 1 to 65535, got 70000"),
        ({"key": (3, 500, 0, 96)}, "key heads: expected 1 to 65535, got 0"),
        ({"key": (3, 500, 3, 96)}, "query heads: expected a multiple of 3 key heads, got 4"),
        ({"key": (500, 2, 96)}, "key: expected 4 axes, got 3"),
        ({"value": (3, 500, 2, 64)}, "value: expected float16 [3, 500, 2, 96], got float16 [3, 5"),
        ({"partial_counts": (3, 1, 3)}, "partial_counts: expected int32 [3, 1, 2], got int32 [3, "),
        ({"full_indices": (1, 1, 2, 5)}, "full_indices, entries of a line: expected 1 to 4, got 5"),
        ({"full_indices": (1, 1, 2, 0)}, "full_indices, entries of a line: expected 1 to 4, got 0"),
        ({"rows": (2, 300, 4)}, "rows: expected int32 [3, 300, 4], got int32 [2, 300, 4]"),
        ({"lse": (3, 4, 299)}, "lse: expected float32 [3, 4, 300], got float32 [3, 4, 299]"),
    ],
)
def test_the_message_says_what_was_expected(fa4, changes: dict, sentence: str):
    call = made(fa4, is_backward=False)
    wrong = {
        x: call[x].changed(**({"dtype": y} if isinstance(y, str) else {"shape": y}))
        for x, y in changes.items()
    }
    code, message = outcome(fa4, call.changed(**wrong))
    assert (code, message[: len(sentence)]) == ("wrong call", sentence)


def test_bits_have_a_word_for_32_keys(fa4):
    for keys, words in ((1, 1), (32, 1), (33, 2), (500, 16)):
        call = made(fa4, False, (3, 300, keys, 4, 2), mask_heads=4)
        wrong = call["bits"].with_extent(3, words + 1)
        assert call["bits"].shape[3] == words
        assert outcome(fa4, call.changed(bits=wrong)) == (
            "wrong call",
            f"bits: expected uint32 [1, 4, 300, {words}], got uint32 [1, 4, 300, {words + 1}]",
        )


def test_bytes_and_addresses_are_in_the_message(fa4):
    call = made(fa4, is_backward=False)
    short = call["out"].changed(bytes=100)
    assert outcome(fa4, call.changed(out=short))[1] == "out: expected 691200 bytes, got 100"
    skewed = call["rows"].changed(address=(1 << 20) + 8)
    sentence = "rows: expected an address that is a multiple of 16, got 1048584"
    assert outcome(fa4, call.changed(rows=skewed))[1] == sentence


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("which", ["operands", "results"])
def test_missing_and_further_arrays_are_refused(fa4, which: str, is_backward: bool):
    call = made(fa4, is_backward)
    right = getattr(call, which)
    for count in range(len(right)):
        fewer = dataclasses.replace(call, **{which: dict([*right.items()][:count])})
        code, message = outcome(fa4, fewer)
        assert code == "wrong call" and message.startswith(f"{which}: expected "), message
        assert message.endswith(f", got {count}")
    more = dataclasses.replace(call, **{which: right | {"another": right[next(iter(right))]}})
    assert outcome(fa4, more)[1].endswith(f", got {len(right) + 1}")


def test_scratch_whose_numbers_32_bits_cannot_count_is_refused(fa4):
    """Kernels compute a place in the sums of dq, dk and dv as an int32."""
    rows, keys = (((2**31 - 1) // 96 // tile) * tile for tile in (64, 128))
    for name, last, longer in (
        ("query_sums", (1, rows, 64, 1, 1), (1, rows + 1, 64, 1, 1)),
        ("key_sums", (1, 64, keys, 2, 1), (1, 64, keys + 1, 2, 1)),
    ):
        assert outcome(fa4, made(fa4, True, last)) == ("accepted", "")
        code, message = outcome(fa4, made(fa4, True, longer))
        assert code == "wrong call"
        assert message.startswith(f"{name}: expected 1 to 2147483647, got")
        assert outcome(fa4, made(fa4, False, longer)) == ("accepted", "")


@pytest.mark.parametrize(
    "shape", [(65535, 2**31 - 1100, 64, 1, 1), (65535, 64, 2**31 - 1100, 65535, 65535)]
)
@pytest.mark.parametrize("is_backward", [False, True])
def test_more_than_a_process_can_address_is_refused(fa4, shape, is_backward: bool):
    code, message = outcome(fa4, made(fa4, is_backward, shape))
    assert code == "wrong call" and _HUGE.fullmatch(message), message


@pytest.mark.parametrize("form", _FORMS)
def test_sinks_are_of_one_batch_row_or_of_each(fa4, form: str):
    call = made(fa4, False, mask_heads=_FORMS[form], has_sinks=True)
    for batch in (1, SHAPE[0]):
        right = call["sinks"].changed(shape=(batch, SHAPE[3]))
        assert outcome(fa4, call.changed(sinks=right)) == ("accepted", "")
    wrong = call["sinks"].changed(shape=(2, SHAPE[3]))
    sentence = "sinks: expected float32 [3, 4], got float32 [2, 4]"
    assert outcome(fa4, call.changed(sinks=wrong)) == ("wrong call", sentence)


def test_a_set_whose_kernels_take_no_sinks_says_so(fa4):
    sentence = f"the kernels {fa4_stand_in.WITHOUT_SINKS} take no sinks"
    for has_sinks, expected in ((True, ("unsupported", sentence)), (False, ("accepted", ""))):
        call = made(fa4, False, name=fa4_stand_in.WITHOUT_SINKS, has_sinks=has_sinks)
        assert outcome(fa4, call) == expected


def test_a_set_without_gradients_of_grouped_heads_says_so(fa4):
    call = made(fa4, True, name=WITHOUT_GROUPS)
    sentence = f"the kernels {WITHOUT_GROUPS} have no backward pass of grouped heads"
    assert outcome(fa4, call) == ("unsupported", sentence)
    assert outcome(fa4, made(fa4, True, ALONE, WITHOUT_GROUPS)) == ("accepted", "")
    assert outcome(fa4, made(fa4, False, name=WITHOUT_GROUPS)) == ("accepted", "")
