"""Drawn attributes of cuDNN's custom calls, which must be refused by name or be accepted.

If attributes are accepted, the sizes of their buffers are computed again here in Python's integers,
from the shapes in cuda_backend/buffers.h, and cuDNN plans some of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from attn_dispatch.cudnn import rules
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch.devices.target import parse
from tests.fuzz.hostile_attributes import (
    BIASED,
    MODDED,
    MODDED_BACKWARD,
    PACKED,
    PACKED_BACKWARD,
    PAGED,
)
from tests.fuzz.hostile_attributes import library as native_library
from tests.support.plan_cases import ARCHS, CASES

Attributes = dict[str, Any]
Sizes = list[tuple[str, int]]

PLANNED = 16
"""cuDNN plans one of this many draws, if it is accepted."""
_MAX_PLANNED_NODES = 40
"""The most nodes of a program that cuDNN plans here: larger ones take seconds."""

_LABELS = [(label, direction) for label in CASES for direction in ("forward", "backward")]
_WRITTEN = [BIASED | {"seq_len_kv": 250}, PAGED, PACKED, PACKED_BACKWARD, MODDED, MODDED_BACKWARD]

_INTEGERS = [
    -(2**63), -(2**31), -3, -1, 0, 1, 2, 3, 7, 8, 16, 63, 64, 100, 256, 65535, 65536, 2**20,
    2**31 - 1, 2**31, 2**32, 2**40, 2**61, 2**62, 2**63 - 1, 2**64,
]  # fmt: skip
_FLOATS = [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-40, 0.5, 0.999, 1.0, 2.0, 3e38, 1e300]
_WORDS = ["", "float16", "bfloat16", "float32", "junk", "int8", "6 STAGES=1", "é", "f0 = neg x"]
_OTHER_TYPES = [None, True, 0, 1.5, "2", [1], {}, b"bfloat16"]
_TOKENS = [
    "x", "t", "s", "g", "o0", "o1", "o99", "f0", "i1", "p2", "f999", "=", "neg", "add", "select",
    "lt", "pow", "convert", "#1", "#1.5", "#-inf", "#nan", "#", "#1e999", "#zz", "", "f", "junk",
]  # fmt: skip
_FULL = {"bias_batch": "batch", "bias_heads": "num_heads", "bias_rows": "seq_len_q"}
_ARRAY_AXES = ("batch", "num_heads", "seq_len_q", "seq_len_kv")


@lru_cache(maxsize=256)
def real(i: int) -> tuple[Attributes, ...]:
    """cuDNN's variants of a real call."""
    label, direction = _LABELS[i]
    spec = CASES[label].spec(direction)
    if rules.not_supported_reasons(spec):
        return ()
    return tuple(call.attributes for call in variants_of(spec))


def drawn(rng: random.Random) -> Attributes:
    """A real call with none, one or several of its attributes changed."""
    variants = () if rng.random() < 0.2 else real(rng.randrange(len(_LABELS)))
    return changed(rng, rng.choice(variants or tuple(_WRITTEN)))


def changed(rng: random.Random, original: Attributes) -> Attributes:
    attributes = dict(original)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 6))):
        rng.choice(_CHANGES)(rng, attributes)
    return attributes


def _change_value(rng: random.Random, x: Attributes) -> None:
    name = rng.choice(list(x))
    if isinstance(x[name], bool):
        x[name] = not x[name]
    elif isinstance(x[name], int):
        x[name] = _integer(rng, x[name], x)
    elif isinstance(x[name], float):
        x[name] = rng.choice(_FLOATS)
    elif name in ("score_nodes", "gradient_nodes") and x[name]:
        x[name] = _nodes(rng, x[name])
    elif name == "node_arrays" and x[name]:
        x[name] = _arrays(rng, x[name])
    else:
        x[name] = rng.choice(_WORDS)


def _integer(rng: random.Random, value: int, x: Attributes) -> int:
    others = [y for y in x.values() if type(y) is int]
    near = [value - 1, value + 1, 2 * value, value // 2, value - 8, value + 8, -value]
    return rng.choice(rng.choice((_INTEGERS, near, others)))


def _change_extent(rng: random.Random, x: Attributes) -> None:
    """Change an extent and the attributes that equal it, which often gives another valid call."""
    name = rng.choice(("batch", "num_heads", "seq_len_q", "seq_len_kv", "page_size", "num_pages"))
    if name not in x or type(x[name]) is not int:
        return
    before, after = x[name], _integer(rng, x[name], x)
    for other in (name, *(y for y, full in _FULL.items() if full == name)):
        if x.get(other) == before:
            x[other] = after
    if name == "num_heads" and x.get("num_kv_heads") == before:
        x["num_kv_heads"] = after
    heads_first = {"seq_len_q": "head_rows_q", "seq_len_kv": "head_rows_kv"}.get(name)
    if heads_first and x.get(heads_first) == before:
        x[heads_first] = after
    if name in _ARRAY_AXES and isinstance(x.get("node_arrays"), str):
        place = 1 + _ARRAY_AXES.index(name)
        arrays = [y.split() for y in x["node_arrays"].split(",")]
        for words in arrays:
            if len(words) == 5 and words[place] == str(before):
                words[place] = str(after)
        x["node_arrays"] = ", ".join(" ".join(words) for words in arrays)


def _change_type(rng: random.Random, x: Attributes) -> None:
    x[rng.choice(list(x))] = rng.choice(_OTHER_TYPES)


def _drop(rng: random.Random, x: Attributes) -> None:
    del x[rng.choice(list(x))]


def _add(rng: random.Random, x: Attributes) -> None:
    x[rng.choice(("surplus", "Batch", "batch ", "scales"))] = rng.choice(_OTHER_TYPES)


def _take_another(rng: random.Random, x: Attributes) -> None:
    """Take some attributes from another real call."""
    other = rng.choice(real(rng.randrange(len(_LABELS))) or tuple(_WRITTEN))
    for name in rng.sample(list(other), rng.randrange(1, 6)):
        x[name] = other[name]


_CHANGES: list[Callable[[random.Random, Attributes], None]] = [
    *[_change_value] * 6, *[_change_extent] * 4, _take_another, _change_type, _drop, _add,
]  # fmt: skip


def _nodes(rng: random.Random, text: str) -> str:
    nodes = [x.split() for x in text.split(";")]
    i = rng.randrange(len(nodes))
    match rng.randrange(9):
        case 0:
            del nodes[i]
        case 1:
            nodes.insert(i, nodes[rng.randrange(len(nodes))])
        case 2:
            rng.shuffle(nodes)
        case 3:
            nodes[i] = nodes[i][: rng.randrange(len(nodes[i]) + 1)]
        case 4:
            nodes[i] = [*nodes[i], rng.choice(_TOKENS)]
        case 5:  # the same program with other names
            return text.replace("f", "f7") if "floor" not in text else text
        case 6:
            extra = [
                f"f{1000 + j} = neg {f'f{999 + j}' if j else 'x'}".split()
                for j in range(rng.choice((3, 250, 300, 3000)))
            ]
            nodes = [*extra, *nodes]
        case _:
            nodes[i] = list(nodes[i])
            if nodes[i]:
                nodes[i][rng.randrange(len(nodes[i]))] = rng.choice(_TOKENS)
    return "; ".join(" ".join(x) for x in nodes)


def _arrays(rng: random.Random, text: str) -> str:
    arrays = [x.split() for x in text.split(",")]
    words = rng.choice(arrays)
    match rng.randrange(5):
        case 0:
            arrays.append(list(words))
        case 1:
            arrays.remove(words)
        case 2:
            words.pop()
        case 3:
            words[0] = rng.choice("fidx")
        case _:
            words[rng.randrange(len(words))] = str(rng.choice([*_INTEGERS, "z", "1.5", ""]))
    return ", ".join(" ".join(x) for x in arrays)


def draw(seed: int) -> str:
    rng = random.Random(f"cudnn specs {seed}")
    attributes, native = drawn(rng), native_library()
    arch = rng.choice(ARCHS)
    try:
        operands, results = native.buffers(attributes)
    except native.CudnnError as error:
        return f"refused: {named(error, attributes)}"
    check(attributes, operands, results)
    programs = attributes["score_nodes"] + attributes["gradient_nodes"]
    if seed % PLANNED or programs.count("=") > _MAX_PLANNED_NODES:
        return "taken"
    try:
        native.plan(attributes, parse(arch).properties)
    except native.CudnnError as error:
        assert error.code in ("unsupported", "finalize failed"), (error.code, str(error))
        return "cuDNN has no plan"
    return "planned"


def named(error: Exception, attributes: Attributes) -> str:
    """The attribute that a refusal names first."""
    assert error.code == "wrong call", (error.code, str(error))  # type: ignore[attr-defined]
    message = str(error)
    names = [x for x in {*attributes, *MODDED} if x and x in message]
    assert names and len(message) < 2000, message
    return min(names, key=lambda x: (message.index(x), -len(x)))


def check(x: Attributes, operands: Sizes, results: Sizes) -> None:
    """Check that the sizes are right, and that no value makes a kernel touch other memory."""
    assert (operands, results) == sizes(x)
    assert all(0 < size < 2**47 for _, size in (*operands, *results))
    assert x["bias_batch"] in (1, x["batch"]) and x["bias_heads"] in (1, x["num_heads"])
    assert x["bias_rows"] in (1, x["seq_len_q"]) and x["num_heads"] % x["num_kv_heads"] == 0
    assert 0 <= x["dropout_rate"] < 1 and math.isfinite(x["scale"])
    windows = x["window_left"], x["window_right"]
    assert -1 <= min(windows) and max(windows) < 2**31 - 1
    # Strides follow from these: a wrong one leads out of a buffer of the right size.
    for side, rows in (("q", x["seq_len_q"]), ("kv", x["page_size"] or x["seq_len_kv"])):
        head_rows, packed = x[f"head_rows_{side}"], x[f"packed_rows_{side}"]
        assert not head_rows or (packed % head_rows == 0 if packed else head_rows == rows)
        assert not (head_rows and packed and x["backward"])
        assert not packed or x[f"seq_len_{side}"] <= max(packed, 2 if side == "q" else 1)
    assert x["page_size"] or not (x["num_pages"] or x["has_value_table"])
    assert x["backward"] or not (x["needs_dbias"] or x["gradient_nodes"])
    assert not x["backward"] or not (x["has_sinks"] or x["page_size"] or x["needs_keep"])
    for array in _node_arrays(x):
        extents = [int(y) for y in array[1:]]
        assert all(y in (1, x[axis]) for y, axis in zip(extents, _ARRAY_AXES, strict=True))
    if x["has_lengths"] and not x["packed_rows_q"]:
        assert x["packed_rows_kv"] == 0
    nodes = [y.split() for y in x["score_nodes"].split(";") if y]
    assert len(nodes) <= 256 and all(4 <= len(y) <= 6 for y in nodes)


def sizes(x: Attributes) -> tuple[Sizes, Sizes]:
    """The operands and results with their bytes, from the shapes in buffers.h."""
    b, n, k = x["batch"], x["num_heads"], x["num_kv_heads"]
    t, s, h, v = x["seq_len_q"], x["seq_len_kv"], x["head_dim"], x["head_dim_v"]
    rows_q, rows_kv = x["packed_rows_q"] or b * t, x["packed_rows_kv"] or b * s
    keys = x["num_pages"] * x["page_size"] if x["page_size"] else rows_kv
    statistic = 4 * rows_q * n
    operands: Sizes = []
    if x["clears_rows"]:
        operands.append(("flags_q", rows_q * (n if x["head_rows_q"] else 1)))
        if x["backward"]:
            operands.append(("flags_kv", rows_kv * (k if x["head_rows_kv"] else 1)))
    operands += [("query", 2 * rows_q * n * h)]
    operands += [("key", 2 * keys * k * h), ("value", 2 * keys * k * v)]
    if x["backward"]:
        operands += [("out", 2 * rows_q * n * v), ("lse", statistic)]
        operands += [("out_grad", 2 * rows_q * n * v)]
    if x["has_lengths"]:
        operands += [("lengths_q", 4 * b), ("lengths_kv", 4 * b)]
    if x["packed_rows_q"]:
        has_statistics = x["backward"] or x["needs_lse"] or x["needs_max"]
        kinds = ["query", "key", "value", "out", *(["lse"] if has_statistics else [])]
        operands += [(f"offsets_{kind}", 4 * (b + 1)) for kind in kinds]
    if x["page_size"]:
        table = 4 * b * -(-s // x["page_size"])
        operands += [("page_table", table)]
        operands += [("value_table", table)] if x["has_value_table"] else []
    if x["bias_dtype"]:
        pairs = x["bias_batch"] * x["bias_heads"] * x["bias_rows"] * (-(-s // 8) * 8)
        operands.append(("bias", pairs * (4 if x["bias_dtype"] == "float32" else 2)))
    operands += [
        (f"o{i}", 4 * math.prod(int(y) for y in array[1:]))
        for i, array in enumerate(_node_arrays(x))
    ]
    operands += [("sinks", 4 * n)] if x["has_sinks"] else []
    operands += [("seed", 8), ("seed_offset", 8)] if x["dropout_rate"] else []
    if x["backward"]:
        results = [("dq", 2 * rows_q * n * h), ("dk", 2 * rows_kv * k * h)]
        results += [("dv", 2 * rows_kv * k * v)]
        if x["needs_dbias"]:
            results.append(("dbias", 2 * x["bias_batch"] * x["bias_heads"] * t * s))
        return operands, results
    results = [("out", 2 * rows_q * n * v)]
    results += [("lse", statistic)] if x["needs_lse"] else []
    results += [("row_max", statistic), ("row_sum", statistic)] if x["needs_max"] else []
    results += [("keep", 4 * b * n * t * s)] if x["needs_keep"] else []
    return operands, results


def _node_arrays(x: Attributes) -> list[list[str]]:
    return [array.split() for array in x["node_arrays"].split(",") if array]
