"""The `attn-dispatch explain` command: what would run a call that is written as a line of text."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_dispatch.call.keywords import CallArguments
from attn_dispatch.core import select
from attn_dispatch.core.explanation import UNKNOWN, Explanation
from attn_dispatch.inspection import Shaped, explain
from attn_dispatch.text import error_text
from attn_dispatch.warning import AttentionConventionWarning
from attn_dispatch_tools.terminal import style
from attn_dispatch_tools.terminal.help import (
    VERBOSE,
    Commands,
    add_command,
    add_options,
    flag,
    one_name,
    option,
)
from attn_dispatch_tools.terminal.text import filled, width
from attn_dispatch_tools.written_calls import notation
from attn_dispatch_tools.written_calls.flags import MASK_FLAGS, add_mask_flags, given
from attn_dispatch_tools.written_calls.json_file import each_of

_DESCRIPTION = """\
Say which implementation would run a call, forward and backward, and why each of the others would
not. No GPU is needed: name a --target.

CALL is a line of arguments: arrays as dtype[shape], and anything else that
attn_dispatch.dot_product_attention takes, as name=value in JSON. q, k and v are query, key and
value. Without v, value is the same array as key; without k, key is the same array as query. CALL
may also be a .json file of calls, in the format of `attn-dispatch plan`.
"""
_EXAMPLES = (
    'attn-dispatch explain "q=bf16[2,4096,32,128] k=bf16[2,4096,8,128]" \\\n'
    "    --causal --target h100",
    'attn-dispatch explain "q=bf16[1,8192,16,64]" --segments 8 --target mi300x',
    'attn-dispatch explain "q=f16[8,512,12,64] bias=f16[12,512,512]" --target a100',
    "attn-dispatch explain calls.json --target b200",
)


def add_parser(commands: Commands, help: str) -> None:
    """Add `explain` to the parser of `attn-dispatch`."""
    parser = add_command(
        commands, "explain", main, help=help, description=_DESCRIPTION, examples=_EXAMPLES,
        options=(
            option("call", "CALL", "arguments of a call, or a .json file", nargs="+"),
            option("--target", "DEVICE",
                "h100, b200, rtx4090, mi300x, sm90, cpu, … (default: the device that is here)"),
            option("--implementation", "NAME",
                f"only this one: {', '.join(select.names())}; may be repeated",
                type=one_name, action="append"),
            VERBOSE,
        ),
    )  # fmt: skip
    call = parser.add_argument_group("arguments of the call")
    add_mask_flags(call)
    add_options(
        call,
        option("--segments", "M",
            "packed rows: segment ids of queries and keys, and max_segments=M",
            type=int, dest="max_segments"),
        flag("--lengths", "key_value_seq_lengths, one for each batch row"),
        option("--scale", "X", "scale=X", type=float),
        option("--soft-cap", "C", "logits_soft_cap=C", type=float, dest="logits_soft_cap"),
        flag("--alibi", "alibi_slopes, one for each head"),
        flag("--sinks", "sinks, one for each head"),
        option("--dropout", "RATE", "dropout_rate=RATE, and a key",
            type=float, dest="dropout_rate"),
        flag("--deterministic", "deterministic_backward=True", dest="deterministic_backward"),
        flag("--lse", "return_lse=True", dest="return_lse"),
    )  # fmt: skip


_FLAGS = (
    *MASK_FLAGS, "max_segments", "scale", "logits_soft_cap", "dropout_rate",
    "deterministic_backward", "return_lse", "implementation",
)  # fmt: skip


def main(args: argparse.Namespace) -> None:
    """Print the explanation; ends the process with status 1 if nothing is known to run a call."""
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always", AttentionConventionWarning)
            found = _explanations(args)
    except (OSError, OverflowError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error_text(error)}") from error
    for warning in given:
        print(filled(f"warning: {warning.message}"), file=sys.stderr)
    style.show("\n\n".join(x.text(width(), codes=args.verbose) for x in found), _MARKS)
    singles = [x.single_queries for x in found if x.single_queries is not None]
    if any(x.chosen_forward in (None, UNKNOWN) for x in (*found, *singles)):
        raise SystemExit(1)


_MARKS = {
    r"(?m)^chosen .*": style.HEADING,
    r"(?m)^(?:call|device|versions|planner|mask_mod|forward|backward)\b": style.QUIET,
    r"(?m)^(?:forward|backward) +\w+ +(runs:)": style.GOOD,
    r"(?m)^(?:forward|backward) +\w+ +(cannot run:$|unknown:)": style.NOT,
}


def _explanations(args: argparse.Namespace) -> list[Explanation]:
    def explained(**arguments: Unpack[CallArguments[Shaped]]) -> Explanation:
        return explain(**arguments | _flags(args, arguments), target=args.target)

    call = " ".join(args.call)
    if call.endswith(".json"):
        return [found for _, found in each_of(Path(call), explained)]
    return [explained(**notation.arguments(call))]


def _query_and_key(
    arguments: CallArguments[Shaped],
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The call's query and key, which is like query if the call does not have it."""
    query, key = arguments.get("query"), arguments.get("key")
    found: list[jax.ShapeDtypeStruct] = []
    for name, x in (("query", query), ("key", query if key is None else key)):
        if not isinstance(x, jax.ShapeDtypeStruct) or len(x.shape) < 3:
            got = (
                f"{x.dtype.name}{list(x.shape)}" if isinstance(x, jax.ShapeDtypeStruct) else repr(x)
            )
            raise ValueError(f"{name}: {notation.EXPECTED}, got {got}")
        found.append(x)
    return found[0], found[1]


def _flags(args: argparse.Namespace, arguments: CallArguments[Shaped]) -> CallArguments[Shaped]:
    """The arguments that options add to the call. Arrays take their sizes from query and key."""
    added = given(args, _FLAGS)
    query, key = _query_and_key(arguments)
    rows, heads = (-2, -3) if arguments.get("qkv_layout") == "BNTH" else (-3, -2)
    batch = query.shape[:-3]

    def array(dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    if args.max_segments is not None:
        added["query_segment_ids"] = array(jnp.int32, *batch, query.shape[rows])
        if key.shape[rows] != query.shape[rows]:
            added["key_value_segment_ids"] = array(jnp.int32, *batch, key.shape[rows])
    if args.lengths:
        added["key_value_seq_lengths"] = array(jnp.int32, *batch)
    if args.alibi:
        added["alibi_slopes"] = array(jnp.float32, query.shape[heads])
    if args.sinks:
        added["sinks"] = array(jnp.float32, query.shape[heads])
    rate = args.dropout_rate or arguments.get("dropout_rate")
    if rate and "dropout_key" not in arguments:
        added["dropout_key"] = jax.random.key(0)
    if both := [name for name in added if name in arguments]:
        raise ValueError(f"{both[0]}: expected it once, got it in the call and as an option")
    return added
