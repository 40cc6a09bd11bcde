"""Sets of attributes that no version of this library writes. Each must be refused.

A refusal names the wrong attribute. A seed is an index into `HOSTILE`. Every function of `_cuda`
that takes attributes is called.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from types import ModuleType
from typing import Any

from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.devices import native_libraries
from attn_dispatch.devices.target import parse
from tests.support.cudnn_calls import cudnn_attributes

FORWARD = cudnn_attributes()
"""A call on bfloat16 with query, key and value of [2, 256, 8, 64]."""
BACKWARD = cudnn_attributes(backward=True)
LENGTHS = FORWARD | {"has_lengths": True}
PACKED = LENGTHS | {"packed_rows_q": 512, "packed_rows_kv": 512}
PACKED_BACKWARD = PACKED | {"backward": True}
PAGED = LENGTHS | {"page_size": 64, "num_pages": 8, "seq_len_q": 1}
BIASED = FORWARD | {"bias_dtype": "bfloat16", "bias_batch": 2, "bias_heads": 8, "bias_rows": 256}
MODDED = FORWARD | {
    "moves_scores": True,
    "bends_scores": True,
    "score_nodes": "f0 = tanh x; p1 = lt s t; f2 = select f0 o0 p1",
    "node_arrays": "f 1 8 1 1",
}
MODDED_BACKWARD = MODDED | {"backward": True, "gradient_nodes": "f3 = mul g f0"}

CHAIN = "; ".join(f"f{i} = neg {f'f{i - 1}' if i else 'x'}" for i in range(100_000))
MANY_ARRAYS = ", ".join(["f 1 8 1 1"] * 257)

Attributes = dict[str, Any]


def _nodes(text: str) -> Attributes:
    return MODDED | {"score_nodes": text, "node_arrays": ""}


def _gradient(text: str) -> Attributes:
    return MODDED_BACKWARD | {"gradient_nodes": text}


HOSTILE: dict[str, tuple[str, Attributes]] = {
    # Extents.
    "no batch": ("batch", FORWARD | {"batch": 0}),
    "a batch below 0": ("batch", FORWARD | {"batch": -1}),
    "a batch of 2^31": ("batch", FORWARD | {"batch": 2**31}),
    "a batch beyond 64 bits": ("batch", FORWARD | {"batch": 2**70}),
    "no heads": ("num_heads", FORWARD | {"num_heads": 0}),
    "no kv heads": ("num_kv_heads", FORWARD | {"num_kv_heads": 0}),
    "kv heads below 0": ("num_kv_heads", FORWARD | {"num_kv_heads": -8}),
    "heads that kv heads do not divide": ("num_heads", FORWARD | {"num_kv_heads": 3}),
    "more kv heads than heads": ("num_heads", FORWARD | {"num_kv_heads": 16}),
    "no queries": ("seq_len_q", FORWARD | {"seq_len_q": 0}),
    "queries of 2^62": ("seq_len_q", FORWARD | {"seq_len_q": 2**62}),
    "no keys": ("seq_len_kv", FORWARD | {"seq_len_kv": 0}),
    "keys of -2^63": ("seq_len_kv", FORWARD | {"seq_len_kv": -(2**63)}),
    "no head dim": ("head_dim", FORWARD | {"head_dim": 0}),
    "a head dim of 60": ("head_dim", FORWARD | {"head_dim": 60}),
    "a head dim that takes cuDNN minutes": ("head_dim", FORWARD | {"head_dim": 2**20}),
    "a head dim below 0": ("head_dim", FORWARD | {"head_dim": -64}),
    "a value dim of 4": ("head_dim_v", FORWARD | {"head_dim_v": 4}),
    "a value dim of 2^40": ("head_dim_v", FORWARD | {"head_dim_v": 2**40}),
    # Products that overflow, or exceed any memory.
    "batch, heads and queries that wrap": (
        "batch",
        FORWARD
        | {"batch": 65535, "num_heads": 65535, "num_kv_heads": 65535, "seq_len_q": 2**31 - 1},
    ),
    "arrays of 2^64 bytes": (
        "seq_len_q",
        FORWARD
        | {"batch": 2**16, "num_heads": 2**16, "num_kv_heads": 2**16, "seq_len_q": 2**16}
        | {"head_dim": 2**12, "head_dim_v": 2**12},
    ),
    "arrays of 2^48 bytes": ("batch", FORWARD | {"batch": 2**30, "seq_len_q": 2**8}),
    "packed arrays whose strides wrap": (
        "batch",
        PACKED | {"batch": 2**30, "seq_len_kv": 2**30, "packed_rows_kv": 2**30},
    ),
    "a keep mask of 2^50 bytes": (
        "seq_len_kv",
        FORWARD
        | {"needs_keep": True, "dropout_rate": 0.5, "seq_len_q": 2**22, "seq_len_kv": 2**22},
    ),
    # Words.
    "no dtype": ("dtype", FORWARD | {"dtype": ""}),
    "a junk dtype": ("dtype", FORWARD | {"dtype": "junk"}),
    "float32 arrays": ("dtype", FORWARD | {"dtype": "float32"}),
    "half of a surrogate pair": ("dtype", FORWARD | {"dtype": "\ud800"}),
    "a junk bias dtype": ("bias_dtype", BIASED | {"bias_dtype": "junk"}),
    "a bias of integers": ("bias_dtype", BIASED | {"bias_dtype": "int32"}),
    # Numbers.
    "scale NaN": ("scale", FORWARD | {"scale": math.nan}),
    "scale infinite": ("scale", FORWARD | {"scale": math.inf}),
    "scale beyond float32": ("scale", FORWARD | {"scale": -1e300}),
    "dropout NaN": ("dropout_rate", FORWARD | {"dropout_rate": math.nan}),
    "dropout of -1": ("dropout_rate", FORWARD | {"dropout_rate": -1.0}),
    "dropout of everything": ("dropout_rate", FORWARD | {"dropout_rate": 1.0}),
    "a window of -2": ("window_left", FORWARD | {"window_left": -2}),
    "a window of 2^31": ("window_left", FORWARD | {"window_left": 2**31 - 1}),
    "a right window of -2^63": ("window_right", FORWARD | {"window_right": -(2**63)}),
    # A bias.
    "a bias of no rows": ("bias_rows", BIASED | {"bias_rows": 0}),
    "a bias of half the rows": ("bias_rows", BIASED | {"bias_rows": 128}),
    "a bias of 3 heads": ("bias_heads", BIASED | {"bias_heads": 3}),
    "a bias of a larger batch": ("bias_batch", BIASED | {"bias_batch": 4}),
    "a bias of -1 batch rows": ("bias_batch", BIASED | {"bias_batch": -1}),
    "the gradient of no bias": ("needs_dbias", BACKWARD | {"needs_dbias": True}),
    "a bias gradient going forward": ("needs_dbias", BIASED | {"needs_dbias": True}),
    # Layouts.
    "packed queries, keys not": ("packed_rows_kv", PACKED | {"packed_rows_kv": 0}),
    "packed keys, queries not": ("packed_rows_kv", PACKED | {"packed_rows_q": 0}),
    "packed rows below 0": ("packed_rows_q", PACKED | {"packed_rows_q": -512}),
    "packed rows of 2^61": (
        "packed_rows_q",
        PACKED | {"packed_rows_q": 2**61, "packed_rows_kv": 2**61},
    ),
    "queries longer than packed rows": ("seq_len_q", PACKED | {"seq_len_q": 513}),
    "keys longer than packed rows": ("seq_len_kv", PACKED_BACKWARD | {"seq_len_kv": 513}),
    "packed without lengths": ("has_lengths", PACKED | {"has_lengths": False}),
    "head rows that do not divide packed rows": ("head_rows_q", PACKED | {"head_rows_q": 100}),
    "head rows of packed gradients": ("head_rows_kv", PACKED_BACKWARD | {"head_rows_kv": 256}),
    "head rows below 0": ("head_rows_kv", FORWARD | {"head_rows_kv": -256}),
    "head rows that are not those of the array": ("head_rows_q", FORWARD | {"head_rows_q": 128}),
    "head rows that are not those of a page": ("head_rows_kv", PAGED | {"head_rows_kv": 256}),
    "pages of no keys": ("num_pages", PAGED | {"page_size": 0}),
    "pages of -64 keys": ("page_size", PAGED | {"page_size": -64}),
    "no pages": ("num_pages", PAGED | {"num_pages": 0}),
    "2^40 pages": ("num_pages", PAGED | {"num_pages": 2**40}),
    "pages without lengths": ("has_lengths", PAGED | {"has_lengths": False}),
    "pages going backward": ("page_size", PAGED | {"backward": True}),
    "pages of packed keys": (
        "page_size",
        PAGED | {"packed_rows_q": 512, "packed_rows_kv": 512},
    ),
    "a value table without pages": ("has_value_table", FORWARD | {"has_value_table": True}),
    # Results of the other direction.
    "lse going backward": ("needs_lse", BACKWARD | {"needs_lse": True}),
    "the row maximum going backward": ("needs_max", BACKWARD | {"needs_max": True}),
    "sinks going backward": ("has_sinks", BACKWARD | {"has_sinks": True}),
    "a keep mask without dropout": ("needs_keep", FORWARD | {"needs_keep": True}),
    # Engines.
    "an engine without a number": ("engine", FORWARD | {"engine": "KERNEL_CFG=2"}),
    "a knob of small letters": ("engine", FORWARD | {"engine": "6 stages=1"}),
    "a knob twice": ("engine", FORWARD | {"engine": "6 STAGES=1 STAGES=2"}),
    "a knob of 2^40": ("engine", FORWARD | {"engine": f"6 STAGES={2**40}"}),
    "an engine of a megabyte": ("engine", FORWARD | {"engine": "6 " + "STAGES=1 " * 2**17}),
    # Score programs.
    "a node without its operand": ("score_nodes", _nodes("f0 = neg")),
    "a node of one operand too many": ("score_nodes", _nodes("f0 = neg x x")),
    "a node without a result": ("score_nodes", _nodes("= neg x")),
    "an unknown operation": ("score_nodes", _nodes("f0 = system x")),
    "an operand that is not there": ("score_nodes", _nodes("f0 = add x f7")),
    "a node that reads itself": ("score_nodes", _nodes("f0 = add x f0")),
    "the gradient going forward": ("score_nodes", _nodes("f0 = neg g")),
    "an array that is not there": ("score_nodes", _nodes("f0 = add x o0")),
    "array -1": ("score_nodes", _nodes("f0 = add x o-1")),
    "a name twice": ("score_nodes", _nodes("f0 = neg x; f0 = neg f0")),
    "a node that nobody reads": ("score_nodes", _nodes("f0 = neg x; f1 = neg x")),
    "a predicate as result": ("score_nodes", _nodes("f0 = neg x; p1 = lt t s")),
    "a whole number as result": ("score_nodes", _nodes("i0 = sub t s")),
    "selection by a number": ("score_nodes", _nodes("f0 = select x x x")),
    "a float compared": ("score_nodes", _nodes("p0 = lt x s; f1 = select x x p0")),
    "a number that ends in letters": ("score_nodes", _nodes("f0 = mul x #1.5abc")),
    "a number of no digits": ("score_nodes", _nodes("f0 = mul x #")),
    "a number beyond float32": ("score_nodes", _nodes("f0 = mul x #1e400")),
    "a semicolon at the end": ("score_nodes", _nodes("f0 = neg x;")),
    "100,000 nodes": ("score_nodes", _nodes(CHAIN)),
    "257 nodes": ("score_nodes", _nodes("; ".join(CHAIN.split("; ")[:257]))),
    "nodes that do not change scores": ("moves_scores", FORWARD | {"score_nodes": "f0 = neg x"}),
    "a gradient going forward": ("gradient_nodes", MODDED | {"gradient_nodes": "f3 = neg g"}),
    "a gradient of no nodes": ("gradient_nodes", BACKWARD | {"gradient_nodes": "f0 = neg g"}),
    "a gradient that names a node again": ("gradient_nodes", _gradient("f0 = neg g")),
    "a gradient of text": ("gradient_nodes", _gradient("what?")),
    # Arrays that nodes read.
    "an array of doubles": ("node_arrays", MODDED | {"node_arrays": "d 1 8 1 1"}),
    "an array of three extents": ("node_arrays", MODDED | {"node_arrays": "f 1 8 1"}),
    "an array of no heads": ("node_arrays", MODDED | {"node_arrays": "f 1 0 1 1"}),
    "an array of 3 heads": ("node_arrays", MODDED | {"node_arrays": "f 1 3 1 1"}),
    "an array of 2^62 rows": ("node_arrays", MODDED | {"node_arrays": f"f 1 8 {2**62} 1"}),
    "an array that nobody reads": ("node_arrays", MODDED | {"node_arrays": "f 1 8 1 1, i 1 1 1 1"}),
    "257 arrays": ("node_arrays", MODDED | {"node_arrays": MANY_ARRAYS}),
    "arrays of no nodes": ("node_arrays", FORWARD | {"node_arrays": "f 1 8 1 1"}),
    # Names and types.
    "an attribute is missing": ("scale", {k: x for k, x in FORWARD.items() if k != "scale"}),
    "an attribute too many": ("surplus", FORWARD | {"surplus": 1}),
    "text for a number": ("batch", FORWARD | {"batch": "2"}),
    "a float for an integer": ("batch", FORWARD | {"batch": 2.0}),
    "a bool for an integer": ("batch", FORWARD | {"batch": True}),
    "an integer for a bool": ("backward", FORWARD | {"backward": 1}),
    "nothing for a bool": ("needs_lse", FORWARD | {"needs_lse": None}),
    "a list for a scale": ("scale", FORWARD | {"scale": [1.0]}),
    "a number for a word": ("engine", FORWARD | {"engine": 6}),
}
"""The attribute that a refusal must name, and all attributes, by a description of the error."""

NAMES = tuple(HOSTILE)
PROPERTIES = parse("sm90").properties or ""


@lru_cache(maxsize=1)
def library() -> ModuleType:
    """`_cuda` in this process, with cuDNN, which really plans what is not refused."""
    native = native_libraries.load(native_libraries.CUDA)
    native.load_cudnn(cudnn_library.find().path, allow_stand_ins=True)
    return native


def draw(seed: int) -> str:
    """Call every function with one set of attributes. Returns their common error code."""
    attribute, attributes = HOSTILE[NAMES[seed]]
    native = library()
    line = json.dumps({"key": "", "engine": "", "workspace_bytes": 0}) + " 00"
    functions = {
        "buffers": lambda: native.buffers(attributes),
        "plan": lambda: native.plan(attributes, PROPERTIES),
        "plan_key": lambda: native.plan_key(attributes, PROPERTIES),
        "has_plan": lambda: native.has_plan(attributes, PROPERTIES),
        "export_plan": lambda: native.export_plan(attributes, PROPERTIES),
        "import_plan": lambda: native.import_plan(attributes, PROPERTIES, line),
        "engines": lambda: native.engines(attributes, PROPERTIES),
    }
    messages = set()
    for name, function in functions.items():
        try:
            answer = function()
        except native.CudnnError as error:
            assert error.code == "wrong call", (name, error.code, str(error))
            messages.add(str(error))
        else:
            raise AssertionError(f"{name} accepted it: {answer}")
    (message,) = messages
    assert attribute in message and ("expected" in message or attributes.keys() != FORWARD.keys())
    assert len(message) < 500, message
    return "wrong call"
