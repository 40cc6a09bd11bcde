"""The table of cuDNN's known bugs: every row has a source, and refuses the calls that it names."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.devices.target import parse
from tests.support.backend import needs_cudnn
from tests.support.cudnn_calls import cudnn_attributes
from tests.support.repository import ROOT

TABLE = ROOT / "cuda_backend" / "known_bad.cc"

STILL_OPEN = 999999

_STRINGS = r'((?:"[^"]*"\s*)+)'
_ROW = re.compile(
    r'\{"(\w+)", (kFirst|\d+), (kStillOpen|\d+),\s*\[\].*?\},\s*'
    + _STRINGS
    + r",\s*"
    + _STRINGS
    + r"\}",
    re.DOTALL,
)


class Row(NamedTuple):
    """A known bug: its name, the first and last version that have it, a sentence, its source."""

    name: str
    first: int
    last: int
    sentence: str
    source: str


def rows() -> list[Row]:

    def text(literals: str) -> str:
        return "".join(re.findall(r'"([^"]*)"', literals))

    names = {"kFirst": 0, "kStillOpen": STILL_OPEN}

    def version(text: str) -> int:
        return names[text] if text in names else int(text)

    return [
        Row(name, version(first), version(last), text(sentence), text(source))
        for name, first, last, sentence, source in _ROW.findall(TABLE.read_text())
    ]


FORWARD = cudnn_attributes()
BACKWARD = cudnn_attributes(backward=True)
ONE_BENT = {"bends_scores": True, "seq_len_q": 1, "seq_len_kv": 1, "bias_rows": 1}
ONE = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "seq_len_q": 1}
LENGTHS = {"has_lengths": True}
CAUSAL = {"window_right": 0}
BIAS = {"bias_dtype": "bfloat16", "bias_heads": 8, "bias_rows": 256}
PACKED = LENGTHS | {"packed_rows_q": 512, "packed_rows_kv": 512}

TRIGGERS: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "one_of_everything_backward": (
        "sm90",
        [BACKWARD | ONE, BACKWARD | ONE | LENGTHS | CAUSAL],
        [FORWARD | ONE, BACKWARD | ONE | LENGTHS | {"batch": 2}],
    ),
    "one_query_backward": (
        "sm80",
        [BACKWARD | {"seq_len_q": 1}],
        [FORWARD | {"seq_len_q": 1}, BACKWARD | LENGTHS | {"seq_len_q": 1}],
    ),
    "sm90_half_tile_backward": (
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
    "bias_gradient_soft_cap": (
        "sm90",
        [BACKWARD | BIAS | {"needs_dbias": True, "bends_scores": True}],
        [
            BACKWARD | BIAS | {"bends_scores": True},
            BACKWARD | BIAS | {"needs_dbias": True},
            FORWARD | BIAS | {"bends_scores": True},
        ],
    ),
    "bias_gradient_narrow_value": (
        "sm90",
        [BACKWARD | BIAS | {"needs_dbias": True, "head_dim": 192, "head_dim_v": 112}],
        [
            BACKWARD | BIAS | {"needs_dbias": True, "head_dim": 192, "head_dim_v": 192},
            BACKWARD | BIAS | {"needs_dbias": True, "head_dim": 128, "head_dim_v": 112},
            BACKWARD | BIAS | {"head_dim": 192, "head_dim_v": 112},
        ],
    ),
    "one_query_order": (
        "sm90",
        [FORWARD | {"seq_len_q": 1, "deterministic": True, "needs_lse": x} for x in (True, False)],
        [
            FORWARD | {"seq_len_q": 1, "needs_lse": True},
            FORWARD | {"deterministic": True, "needs_lse": True},
        ],
    ),
    "packed_one_query": (
        "sm90",
        [FORWARD | PACKED | {"seq_len_q": 1}, BACKWARD | PACKED | {"seq_len_q": 1}],
        [FORWARD | PACKED, FORWARD | LENGTHS | {"seq_len_q": 1}],
    ),
    "head_dim_192_backward": (
        "sm90",
        [
            BACKWARD | {"head_dim": x, "head_dim_v": y}
            for x, y in ((160, 112), (136, 72), (192, 120), (184, 128))
        ],
        [
            BACKWARD | {"head_dim": 192, "head_dim_v": 128},
            BACKWARD | {"head_dim": 160, "head_dim_v": 160},
            BACKWARD | {"head_dim": 160, "head_dim_v": 64},
            BACKWARD | {"head_dim": 200, "head_dim_v": 128},
            BACKWARD | LENGTHS | {"head_dim": 160, "head_dim_v": 112},
            FORWARD | {"head_dim": 160, "head_dim_v": 112},
        ],
    ),
    "packed_narrow_value_backward": (
        "sm90",
        [BACKWARD | PACKED | {"head_dim": 256, "head_dim_v": x} for x in (48, 128, 240)],
        [
            BACKWARD | PACKED | {"head_dim": 256, "head_dim_v": 256},
            BACKWARD | PACKED | {"head_dim": 192, "head_dim_v": 128},
            BACKWARD | LENGTHS | {"head_dim": 256, "head_dim_v": 128},
            FORWARD | PACKED | {"head_dim": 256, "head_dim_v": 128},
        ],
    ),
    "scale_not_normal": (
        "sm90",
        [FORWARD | {"scale": x} for x in (0.0, -0.125, 1e-39, 3e38)],
        [BACKWARD | {"scale": 2e-38}, FORWARD | {"scale": 1e30}],
    ),
    "packed_offsets_int32": (
        "sm90",
        [
            FORWARD | PACKED | {"packed_rows_kv": 2**22},
            BACKWARD | PACKED | {"packed_rows_q": 2**22},
        ],
        [FORWARD | PACKED | {"packed_rows_kv": 2**22 - 1}, FORWARD | {"batch": 2**14}],
    ),
    "one_pair_soft_cap_bias": (
        "sm90",
        [FORWARD | BIAS | ONE_BENT],
        [
            FORWARD | ONE_BENT,
            FORWARD | BIAS | ONE_BENT | {"seq_len_kv": 2},
            FORWARD | BIAS | {"seq_len_q": 1, "seq_len_kv": 1, "bias_rows": 1},
        ],
    ),
    "row_max_sinks": (
        "sm90",
        [FORWARD | {"needs_max": True, "has_sinks": True}],
        [FORWARD | {"needs_max": True}, FORWARD | {"needs_lse": True, "has_sinks": True}],
    ),
    "soft_cap_bias_backward": (
        "sm90",
        [
            BACKWARD | BIAS | {"bends_scores": True, "seq_len_kv": 100},
            BACKWARD | {"bends_scores": True, "moves_scores": True, "seq_len_kv": 257},
        ],
        [
            BACKWARD | BIAS | {"bends_scores": True, "seq_len_kv": 256},
            BACKWARD | BIAS | {"bends_scores": True, "seq_len_kv": 100} | LENGTHS,
            BACKWARD | {"bends_scores": True, "seq_len_kv": 100},
            BACKWARD | BIAS | {"seq_len_kv": 100},
            FORWARD | BIAS | {"bends_scores": True, "moves_scores": True, "seq_len_kv": 100},
        ],
    ),
    "one_query_alibi": (
        "sm90",
        [
            FORWARD | {"seq_len_q": 1, "moves_scores": True},
            FORWARD | {"seq_len_q": 1, "moves_scores": True, "has_lengths": True},
        ],
        [
            FORWARD | {"seq_len_q": 1},
            FORWARD | {"seq_len_q": 2, "moves_scores": True},
            FORWARD | {"seq_len_q": 1, "moves_scores": True, "window_right": 0},
        ],
    ),
    "one_query_dropout": (
        "sm90",
        [FORWARD | {"seq_len_q": 1, "dropout_rate": 0.5}],
        [FORWARD | {"seq_len_q": 2, "dropout_rate": 0.5}, FORWARD | {"seq_len_q": 1}],
    ),
    "bias_gradient_small_scale": (
        "sm90",
        [
            BACKWARD | BIAS | {"needs_dbias": True, "dtype": "float16", "scale": 0.003},
            BACKWARD | BIAS | {"needs_dbias": True, "scale": 1e-31},
        ],
        [
            BACKWARD | BIAS | {"needs_dbias": True, "dtype": "float16", "scale": 0.004},
            BACKWARD | BIAS | {"needs_dbias": True, "scale": 1e-30},
            BACKWARD | BIAS | {"dtype": "float16", "scale": 0.003},
        ],
    ),
    "deterministic_narrow_value": (
        "sm90",
        [BACKWARD | {"deterministic": True, "head_dim": 160, "head_dim_v": 104}],
        [
            BACKWARD | {"head_dim": 160, "head_dim_v": 104},
            BACKWARD | {"deterministic": True, "head_dim": 160, "head_dim_v": 160},
            BACKWARD | {"deterministic": True, "head_dim": 128, "head_dim_v": 64},
        ],
    ),
    "launch_grid": (
        "sm90",
        [FORWARD | {"batch": 65536}, FORWARD | {"num_heads": 65536, "num_kv_heads": 65536}],
        [FORWARD | {"batch": 65535, "num_heads": 1, "num_kv_heads": 1, "seq_len_q": 128}],
    ),
    "graph_capture": (
        "sm90",
        [FORWARD | {"seq_len_kv": 1152}, FORWARD | {"seq_len_kv": 1152, "window_left": 64}],
        [FORWARD | {"seq_len_kv": 1024}, FORWARD | {"seq_len_kv": 1152} | CAUSAL],
    ),
    "few_kv_heads_sm100": (
        "sm100",
        [FORWARD | {"num_kv_heads": 4}, BACKWARD | {"num_kv_heads": 1}],
        [FORWARD],
    ),
}
"""A row's name -> a target, calls that the row refuses, calls that it does not."""


def test_every_row_has_a_sentence_and_a_source():
    found = rows()
    assert len(found) == TABLE.read_text().count("[](const SdpaSpec& s, int64_t"), "misread a row"
    for row in found:
        assert row.first <= row.last and len(row.sentence.split()) >= 5
        link = r"github\.com/[\w-]+/[\w-]+/(?:issues|pull|commit)/\w+"
        assert re.search(rf"{link}|^measured on an? \w+ with 9\.\d+$", row.source), row.source


def test_every_row_has_calls_in_this_file():
    assert sorted(row.name for row in rows()) == sorted(TRIGGERS)


@needs_cudnn
@pytest.mark.parametrize("name", TRIGGERS)
def test_a_row_refuses_its_calls_alone(name: str):
    """A row refuses its calls, with its source, for the versions of cuDNN that it names alone."""
    backend = cudnn_library.find().backend
    assert backend is not None
    arch, refused, accepted = TRIGGERS[name]
    (row,) = (row for row in rows() if row.name == name)
    properties = parse(arch).properties
    in_versions = row.first <= backend.cudnn_version() <= row.last

    def refusal(attributes: dict[str, Any]) -> str:
        try:
            backend.engines(attributes, properties)  # refuses what `plan` does, in less time
        except backend.CudnnError as error:
            return str(error)
        return ""

    for attributes in refused:
        found = refusal(attributes)
        assert (f"known bug {name} of cuDNN " in found) == in_versions, attributes
        assert (f"{row.sentence} ({row.source})" in found) == in_versions, attributes
    for attributes in accepted:
        assert f"known bug {name} " not in refusal(attributes), attributes


@needs_cudnn
def test_the_refusal_names_every_bug_that_a_call_meets():
    backend = cudnn_library.find().backend
    assert backend is not None
    with pytest.raises(backend.CudnnError) as error:
        backend.plan(BACKWARD | ONE | {"seq_len_kv": 64}, parse("sm90").properties)
    assert error.value.code == "unsupported"  # pyright: ignore[reportAttributeAccessIssue]
    for part in ("issues/1071", "issues/1072", "issues/196678"):
        assert part in str(error.value)
