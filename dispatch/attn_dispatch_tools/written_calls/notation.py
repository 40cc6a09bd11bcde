"""Reading a call from a line of text such as "q=bf16[2,4096,32,128] is_causal=true"."""

from __future__ import annotations

import re
from math import prod
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.foreign_names import NAMES
from attn_dispatch.call.keywords import CallArguments
from attn_dispatch.files import reading
from attn_dispatch.inspection import Shaped

_SHORT_ARGUMENTS = {"q": "query", "k": "key", "v": "value"}
_SHORT_DTYPES = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
    "i32": "int32", "s32": "int32", "i64": "int64", "u32": "uint32", "pred": "bool",
}  # fmt: skip
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_ARRAY = re.compile(r"(\w+)\[(\d+(?:,\d+)*|)\]")
_NAME = re.compile(r"(?:^|[\s;,])([A-Za-z_]\w*)\s*=")

_WORDS = ("causal_alignment", "implementation", "qkv_layout", "kv_layout")
"""The arguments whose values are words."""

_MAX_BYTES = 2**63 - 1
"""The most bytes of an array, which XLA counts in 64 bits."""

_MAX_DIGITS = 19
"""The most digits of an extent."""

EXPECTED = "expected arrays like 'q=bf16[2,4096,32,128] k=bf16[2,4096,8,128]'"


def array(text: str) -> jax.ShapeDtypeStruct | None:
    """The array for a text like "bfloat16[2,128,8,64]" or "bf16[2,128,8,64]"; None for other texts.

    Raises:
      ValueError: the dtype does not exist, or the array is too large.
    """
    found = _ARRAY.fullmatch(re.sub(r"\s", "", text))
    if found is None:
        return None
    dtype = _dtype(found[1])
    extents = [x for x in found[2].split(",") if x]
    if any(len(x.lstrip("0")) > _MAX_DIGITS for x in extents):
        raise ValueError(f"expected extents below 2^63, got {text!r}")
    shape = tuple(map(int, extents))
    if prod(shape) * dtype.itemsize > _MAX_BYTES:
        raise ValueError(f"expected an array of less than 2^63 bytes, got {found[0]}")
    return jax.ShapeDtypeStruct(shape, dtype)


def _dtype(name: str) -> np.dtype:
    expected = f"expected a dtype like bf16, f32 or float8_e4m3fn, got {name!r}"
    full = _SHORT_DTYPES.get(name, name)
    try:
        dtype = jnp.dtype(full)
    except (TypeError, ValueError):
        raise ValueError(expected) from None
    if not jnp.issubdtype(dtype, jnp.number) and dtype != jnp.bool_:
        raise ValueError(expected)
    if dtype.name != full:  # f8, float, d: sizes in bytes, or none
        raise ValueError(f"{expected}, which is {dtype.name} in NumPy: names here count bits")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype and jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"{expected}, which JAX has with JAX_ENABLE_X64=1 alone")
    return dtype


def arguments(text: str) -> CallArguments[Shaped]:
    """The arguments of a call, by name: arrays as structs, other values as JSON has them.

    q, k and v are short for query, key and value. An argument whose value is the name of another
    argument is the same array. A missing value is the same array as key, a missing key the same
    array as query.

    Raises:
      ValueError: the text is not a call; the message says why.
    """
    names = [*_NAME.finditer(text)]
    if not names or text[: names[0].start()].strip():
        raise ValueError(f"call: {EXPECTED}, got {text!r}")
    ends = [x.start() for x in names[1:]] + [len(text)]
    given: dict[str, object] = {}
    for found, end in zip(names, ends, strict=True):
        name = _SHORT_ARGUMENTS.get(found[1], found[1])
        if name in given:
            raise ValueError(f"call: expected {name} once, got it twice in {text!r}")
        given[name] = _value(name, text[found.end() : end].strip(" \t\n;,"))
    for name, value in given.items():
        if isinstance(value, _Same):
            if not isinstance(given.get(value.name), jax.ShapeDtypeStruct):
                raise ValueError(f"{name}: {EXPECTED}, got {value.name!r}")
            given[name] = given[value.name]
    if "query" not in given:
        raise ValueError(f"call: {EXPECTED}, got no query in {text!r}")
    if "key_pages" not in given:
        given.setdefault("key", given["query"])
        given.setdefault("value", given["key"])
    # The public call checks the values.
    return cast("CallArguments[Shaped]", given)


class _Same:
    """A value that stands for the array of another argument, by the name of that argument."""

    def __init__(self, name: str) -> None:
        self.name = _SHORT_ARGUMENTS.get(name, name)


def _value(name: str, text: str) -> object:
    try:
        if (found := array(text)) is not None:
            return found
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        value = reading.json_value(text)
    except ValueError:
        if text.isidentifier():
            return text if name in _WORDS else _Same(text)
        raise ValueError(
            f"{name}: expected an array like bf16[2,4096,32,128], a number, true, false, null, a "
            f"[list] or a name, got {text!r}{_named_here(name)}"
        ) from None
    return tuple(value) if isinstance(value, list) else value


def _named_here(name: str) -> str:
    """The end of a message: our name for an argument of another library, or nothing.

    Needed only if its value cannot be read; otherwise the public call gives the hint.
    """
    here = NAMES.get(name, "")
    return f"; {name} here {here}" if here.startswith("is ") else ""
