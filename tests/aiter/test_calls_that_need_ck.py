"""The table of docs/install.md, "Calls that need CK", against the rules of ASM kernels alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.aiter.asm_rules import rules_of
from attn_dispatch.aiter.call import widened
from attn_dispatch.aiter.kernels import not_supported_reasons
from attn_dispatch.aiter.release import Release
from attn_dispatch.aiter.rules import ARCHS
from tests.support.aiter_dispatch import grid

NEWEST = Release("v0.1.15", (0, 1, 20))
RULES = rules_of(NEWEST)
PAGE = Path(__file__).parents[2] / "docs" / "install.md"


@dataclass(frozen=True)
class Entry:
    """The beginning of an entry, the rule, and a call that breaks it."""

    text: str
    rule: str
    facts: dict[str, Any] = field(default_factory=dict)
    archs: tuple[str, ...] = ARCHS


def _dims(head_dim: int, head_dim_v: int) -> dict[str, int]:
    return {"head_dim": head_dim, "head_dim_v": head_dim_v}


def _lengths(queries: int, keys: int) -> dict[str, int]:
    names = ("seq_len_q", "max_seq_len_q", "seq_len_kv", "max_seq_len_kv")
    return dict(zip(names, (queries, queries, keys, keys), strict=True))


_942, _950 = ("gfx942",), ("gfx950",)
_BACK: dict[str, Any] = {"backward": True}
_PACKED: dict[str, Any] = {"is_group": True, "has_gaps": True}
_WINDOW: dict[str, Any] = {"mask": "bottom_right", "window_left": 64, "window_right": 0}
_CAUSAL: dict[str, Any] = {"mask": "bottom_right", "window_right": 0}
ENTRIES = (
    Entry("a bias", "asm_bias", {"bias": "bias"}),
    Entry("ALiBi", "asm_alibi", {"bias": "alibi"}),
    Entry("dropout", "asm_dropout", {"dropout_rate": 0.5}),
    Entry("a soft cap", "asm_soft_cap", {"logits_soft_cap": 30.0}),
    Entry("a soft cap", "asm_soft_cap_gradient", _BACK | {"logits_soft_cap": 30.0}),
    Entry("4 GiB", "asm_bytes", {"batch": 2**10, **_lengths(2**14, 2**14)}),
    Entry("strides over 2^31 - 1", "int32", _lengths(2**22, 2**22)),
    Entry("over 65,535 batch rows", "grid", {"batch": 2**16, **_lengths(2, 2)}),
    Entry("float16", "asm_dtype", {"dtype": "float16"}),
    Entry("windows", "asm_window", _WINDOW),
    Entry("a top-left mask", "asm_top_left", _CAUSAL | {"mask": "top_left", **_lengths(512, 64)}),
    Entry("head dims beyond (192, 128)", "asm_head_dims_gfx950", _dims(64, 136)),
    Entry("on gfx950 rows of over 2 MiB", "asm_row_bytes", {"num_heads": 8200}, _950),
    Entry("deterministic gradients", "asm_deterministic", _BACK | {"deterministic": True}, _942),
    Entry("deterministic gradients", "asm_deterministic_gfx950",
        _BACK | {"deterministic": True}, _950),
    Entry("head dims beyond 192", "asm_backward_head_dims_gfx942", _BACK | _dims(200, 64), _942),
    Entry("on gfx950 head dims beyond 128", "asm_backward_head_dims_gfx950",
        _BACK | _dims(64, 136), _950),
    Entry("on gfx950 head dims beyond 128", "asm_backward_narrow_gfx950",
        _BACK | _dims(136, 136), _950),
    Entry("on gfx950 head dims beyond 128", "asm_backward_192_packed",
        _BACK | _PACKED | _dims(192, 128), _950),
    Entry("all on gfx950", "asm_backward_window_gfx950", _BACK | _WINDOW, _950),
    Entry("on gfx942 those of packed", "asm_backward_packed_window",
        _BACK | _WINDOW | _PACKED, _942),
    Entry("on gfx942 those of packed", "asm_backward_window_head_dims",
        _BACK | _WINDOW | _dims(136, 136), _942),
    Entry("on gfx942 those of packed", "asm_backward_window_rows",
        _BACK | _WINDOW | _lengths(150, 150), _942),
    Entry("a bottom-right mask", "asm_backward_beyond_keys",
        _BACK | _CAUSAL | _lengths(300, 290), _950),
    Entry("one query in each", "asm_backward_one_query", _BACK | _lengths(1, 512), _950),
)  # fmt: skip
SWITCH = "aiter/asm_off"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda x: x.rule)
def test_calls_of_the_table_break_their_rules(entry: Entry):
    for arch in entry.archs:
        call = widened(replace(grid.CALL, **entry.facts), arch, NEWEST)
        found = [x.rule for x in not_supported_reasons(call, arch, NEWEST)]
        assert f"aiter/{entry.rule}" in found, (arch, found)


def test_the_table_has_every_rule():
    assert {f"aiter/{x.rule}" for x in ENTRIES} == {x.name for x in RULES} - {SWITCH}
    (why,) = not_supported_reasons(grid.split_calls()[0], "gfx942", NEWEST)
    assert str(why).startswith("few queries with a cache, or keys in pages")


def test_the_table_has_nothing_else():
    section = PAGE.read_text().split("### Calls that need CK\n")[1].split("\n## ")[0]
    rows = [x.strip("| ").split(" | ") for x in section.splitlines() if x.startswith("| ")]
    of_serving = ["up to 8 queries beside a cache", "keys in pages"]
    expected = [*dict.fromkeys(x.text for x in ENTRIES), *of_serving]
    found = [entry for _, calls in rows[1:] for entry in calls.split("; ")]
    assert len(found) == len(expected)
    assert all(x.startswith(y) for x, y in zip(found, expected, strict=True)), (found, expected)


@pytest.mark.parametrize(
    "facts, archs",
    [
        (_dims(8, 128), ARCHS), (_dims(192, 128), ARCHS), (_BACK | _dims(192, 192), _942),
        (_BACK | _dims(136, 64), ARCHS),
        (_BACK | _WINDOW | _dims(64, 64) | _lengths(160, 160), _942),
        (_BACK | {"dtype": "float16"}, ARCHS), (_BACK | _CAUSAL | _lengths(300, 300), ARCHS),
        (_BACK | {"deterministic": True} | _dims(64, 96) | _lengths(300, 256), _950),
    ],
)  # fmt: skip
def test_calls_beside_the_table_run(facts: dict[str, Any], archs: tuple[str, ...]):
    for arch in archs:
        call = widened(replace(grid.CALL, **facts), arch, NEWEST)
        assert not_supported_reasons(call, arch, NEWEST) == ()
