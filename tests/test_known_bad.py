"""The table of cuDNN's known bugs: every row has a source, and refuses with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch import cudnn_library
from attn_dispatch.target import parse
from backend import needs_cudnn
from cudnn_calls import cudnn_attributes

TABLE = Path(__file__).parents[1] / "cuda_backend" / "known_bad.cc"

STILL_OPEN = 999999

_STRINGS = r'((?:"[^"]*"\s*)+)'
_ROW = re.compile(
    r"\{(kFirst|\d+), (kStillOpen|\d+),\s*\[\].*?\},\s*" + _STRINGS + r",\s*" + _STRINGS + r"\}",
    re.DOTALL,
)


def rows() -> list[tuple[int, int, str, str]]:
    """(first version, last version, sentence, source) of each row."""

    def text(literals: str) -> str:
        return "".join(re.findall(r'"([^"]*)"', literals))

    names = {"kFirst": 0, "kStillOpen": STILL_OPEN}

    def version(name: str) -> int:
        return names[name] if name in names else int(name)

    return [
        (version(first), version(last), text(sentence), text(source))
        for first, last, sentence, source in _ROW.findall(TABLE.read_text())
    ]


FORWARD = cudnn_attributes()
BACKWARD = cudnn_attributes(backward=True)
ONE = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "seq_len_q": 1}
LENGTHS = {"has_lengths": True}
CAUSAL = {"window_right": 0}

TRIGGERS: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "issues/1071": (
        "sm90",
        [BACKWARD | ONE, BACKWARD | ONE | LENGTHS | CAUSAL],
        [FORWARD | ONE, BACKWARD | ONE | LENGTHS | {"batch": 2}],
    ),
    "issues/1072": (
        "sm80",
        [BACKWARD | {"seq_len_q": 1}],
        [FORWARD | {"seq_len_q": 1}, BACKWARD | LENGTHS | {"seq_len_q": 1}],
    ),
    "issues/196678": (
        "sm90",
        [
            BACKWARD | {"seq_len_kv": 192},
            BACKWARD | {"seq_len_kv": 64},
            BACKWARD | {"seq_len_kv": 192} | CAUSAL,
            BACKWARD | {"seq_len_kv": 192, "seq_len_q": 192, "window_right": 16},
        ],
        [
            BACKWARD | {"seq_len_kv": 192} | LENGTHS,
            BACKWARD | {"seq_len_q": 192, "seq_len_kv": 192} | CAUSAL,
            FORWARD | {"seq_len_kv": 192},
            BACKWARD | {"seq_len_kv": 200},
        ],
    ),
    "issues/180718": (
        "sm90",
        [FORWARD | {"batch": 65536}, FORWARD | {"num_heads": 65536, "num_kv_heads": 65536}],
        [FORWARD | {"batch": 65535, "num_heads": 1, "num_kv_heads": 1, "seq_len_q": 128}],
    ),
    "pull/2344": (
        "sm90",
        [FORWARD | {"seq_len_kv": 1152}, FORWARD | {"seq_len_kv": 1152, "window_left": 64}],
        [FORWARD | {"seq_len_kv": 1024}, FORWARD | {"seq_len_kv": 1152} | CAUSAL],
    ),
    "issues/193893": (
        "sm100",
        [FORWARD | {"num_kv_heads": 4}, BACKWARD | {"num_kv_heads": 1}],
        [FORWARD],
    ),
}
"""Part of a row's source -> a device, calls that the row refuses, calls that it lets through."""


def test_every_row_has_a_sentence_and_a_source():
    found = rows()
    body = TABLE.read_text()
    assert len(found) == body.count("const SdpaSpec& s, int64_t") > 0, "a row was not understood"
    for first, last, sentence, source in found:
        assert first <= last and len(sentence.split()) >= 5
        links = re.findall(r"github\.com/[\w-]+/[\w-]+/(?:issues|pull|commit)/\w+", source)
        assert links, source


def test_every_row_is_tried_here():
    sources = [source for _, _, _, source in rows()]
    for source in sources:
        assert sum(part in source for part in TRIGGERS) == 1, source
    assert len(sources) == len(TRIGGERS)


@needs_cudnn
@pytest.mark.parametrize("part", TRIGGERS)
def test_row(part: str):
    """Within its versions a row refuses with its source; beyond them it lets calls through."""
    backend = cudnn_library.find().backend
    assert backend is not None
    arch, refused, let_through = TRIGGERS[part]
    first, last, sentence, source = next(row for row in rows() if part in row[3])
    properties = parse(arch).properties
    in_versions = first <= backend.cudnn_version() <= last

    def refusal(attributes: dict[str, Any]) -> str:
        try:
            backend.plan(attributes, properties)
        except backend.CudnnError as error:
            return str(error)
        return ""

    for attributes in refused:
        if in_versions:
            assert f"{sentence} ({source})" in refusal(attributes)
        else:
            assert source not in refusal(attributes)
    for attributes in let_through:
        assert source not in refusal(attributes), attributes


@needs_cudnn
def test_all_bugs_that_a_call_meets_are_told():
    backend = cudnn_library.find().backend
    assert backend is not None
    with pytest.raises(backend.CudnnError) as error:
        backend.plan(BACKWARD | ONE | {"seq_len_kv": 64}, parse("sm90").properties)
    assert error.value.code == "unsupported"
    for part in ("issues/1071", "issues/1072", "issues/196678"):
        assert part in str(error.value)
