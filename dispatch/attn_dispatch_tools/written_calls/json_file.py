"""Calls written down as JSON, for commands to read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from attn_dispatch.call.arguments import ARRAY_ARGUMENTS
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.files import reading
from attn_dispatch.inspection import specs_of
from attn_dispatch_tools.written_calls.notation import array

T = TypeVar("T")

FORMAT = """\
FILE holds a list of calls: the arguments of attn_dispatch.dot_product_attention, or with
cu_seqlens_q those of ragged_dot_product_attention. An array is its dtype and shape, the same array
once more the name of the other argument:

  [{"query": "bfloat16[8,2048,32,128]",
    "key": "bfloat16[8,2048,8,128]", "value": "key",
    "is_causal": true, "local_window_size": [1023, 0]},
   {"query": "bfloat16[16384,32,128]",
    "key": "bfloat16[16384,8,128]", "value": "key",
    "cu_seqlens_q": "int32[17]", "cu_seqlens_kv": "cu_seqlens_q",
    "max_seqlen_q": 4096, "max_seqlen_kv": 4096, "is_causal": true}]
"""


def calls_in(file: Path) -> list[tuple[str, AttentionSpec]]:
    """Each call of the file, as it is written there and as its forward call's spec.

    Where `cu_seqlens_q` makes two of a call on pages, both, and what they are for.

    Raises:
      OSError: the file cannot be read.
      ValueError: it holds something else; says of which call.
    """
    parts = {1: ("",), 2: (" (sequences of one query)", " (blocks of the others)")}
    return [
        (json.dumps(call) + part, spec)
        for call, specs in each_of(file, specs_of)
        for part, spec in zip(parts[len(specs)], specs, strict=True)
    ]


def each_of(file: Path, function: Callable[..., T]) -> list[tuple[dict[str, Any], T]]:
    """Each call of the file, as it is written there, and what the function says of its arguments.

    Raises:
      OSError: the file cannot be read.
      ValueError: it holds something else, or the function does not take a call; says which.
    """
    calls = reading.json_file(file)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{file}: expected a list of objects, one for each call")
    if not calls:
        raise ValueError(f"{file}: expected at least one call, got an empty list")
    found = []
    for number, call in enumerate(calls, 1):
        try:
            found.append((call, function(**arguments_of(call))))
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: call {number}: {error}") from error
    return found


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of one call, structs for its arrays.

    Raises:
      ValueError: an argument that should be an array is none.
    """
    arguments = {name: _value(value) for name, value in call.items()}
    for name, value in arguments.items():
        # What was one array is one: whether lengths are alike goes by that.
        if isinstance(value, str) and isinstance(arguments.get(value), jax.ShapeDtypeStruct):
            arguments[name] = arguments[value]
        elif isinstance(value, str) and name in ARRAY_ARGUMENTS:
            raise ValueError(
                f"{name}: expected an array as 'bfloat16[2,128,8,64]', or the name of another "
                f"argument that is one, got {value!r}"
            )
    return arguments


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and (found := array(value)) is not None:
        return found
    return value
