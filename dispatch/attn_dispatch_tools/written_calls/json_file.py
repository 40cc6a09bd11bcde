"""Reading calls from a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import jax

from attn_dispatch.call.arguments import ARRAY_ARGUMENTS
from attn_dispatch.call.keywords import CallArguments
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.files import reading
from attn_dispatch.inspection import Shaped, specs_of
from attn_dispatch_tools.written_calls.notation import array

T = TypeVar("T")

FORMAT = """\
FILE holds a list of calls: the arguments of attn_dispatch.dot_product_attention, or with
cu_seqlens_q those of ragged_dot_product_attention. An array is written as its dtype and shape, or
as the name of another argument that is the same array:

  [{"query": "bfloat16[8,2048,32,128]",
    "key": "bfloat16[8,2048,8,128]", "value": "key",
    "is_causal": true, "local_window_size": [1023, 0]},
   {"query": "bfloat16[16384,32,128]",
    "key": "bfloat16[16384,8,128]", "value": "key",
    "cu_seqlens_q": "int32[17]", "cu_seqlens_kv": "cu_seqlens_q",
    "max_seqlen_q": 4096, "max_seqlen_kv": 4096, "is_causal": true}]
"""


def calls_in(file: Path) -> list[tuple[str, AttentionSpec]]:
    """Each call of the file, as its JSON text and its forward call's spec.

    A call on pages with `cu_seqlens_q` becomes two calls. Their texts say what each is for.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is no list of calls, or a call is wrong; the message says which.
    """
    parts = {1: ("",), 2: (" (sequences of one query)", " (blocks of the others)")}
    return [
        (json.dumps(call) + part, spec)
        for call, specs in each_of(file, specs_of)
        for part, spec in zip(parts[len(specs)], specs, strict=True)
    ]


def each_of(file: Path, function: Callable[..., T]) -> list[tuple[dict[str, object], T]]:
    """Each call of the file, with the result of `function` for its arguments.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is no list of calls, or the function rejects a call; the message says
        which.
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


def arguments_of(call: dict[str, object]) -> CallArguments[Shaped]:
    """The arguments of one call, with a `jax.ShapeDtypeStruct` for each array.

    Raises:
      ValueError: an argument should be an array, and is something else.
    """
    arguments = {name: _value(value) for name, value in call.items()}
    for name, value in arguments.items():
        # One struct for each array: lengths count as equal if they are one object.
        if isinstance(value, str) and isinstance(arguments.get(value), jax.ShapeDtypeStruct):
            arguments[name] = arguments[value]
        elif isinstance(value, str) and name in ARRAY_ARGUMENTS:
            raise ValueError(
                f"{name}: expected an array as 'bfloat16[2,128,8,64]', or the name of another "
                f"argument that is one, got {value!r}"
            )
    # The public call checks the values.
    return cast("CallArguments[Shaped]", arguments)


def _value(value: object) -> object:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and (found := array(value)) is not None:
        return found
    return value
