"""The `attn-dispatch mask` command: shows which queries of a call attend to which keys."""

from __future__ import annotations

import argparse
import ast
import inspect
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import mods
from attn_dispatch.api import dot_product_attention
from attn_dispatch.choices import did_you_mean
from attn_dispatch.text import error_text
from attn_dispatch_tools.pictures.panel import Figure, Panel, shortened
from attn_dispatch_tools.terminal import style
from attn_dispatch_tools.terminal.help import Commands, add_command, add_options, flag, option
from attn_dispatch_tools.terminal.text import width
from attn_dispatch_tools.written_calls.flags import MASK_FLAGS, add_mask_flags, given

_DESCRIPTION = """\
Show which queries of a call attend to which keys: a line for each query, a column for each key.
x: the query attends to the key. .: it does not. _: one of the two is padding. With --alibi, a
number in place of x is ALiBi's distance; with a score_mod, what it returns for a score of 0.
"""
_EXAMPLES = (
    "attn-dispatch mask --seq 16 --causal --window 4",
    "attn-dispatch mask --seq 5,8 --causal --bottom-right --lengths 4,6",
    "attn-dispatch mask --seq 8 --segments 1,1,1,2,2,3,3,0 --causal --out mask.svg",
    'attn-dispatch mask --seq 12 --mod "chunked_window(4)"',
)
_MAX_LENGTH = 512
"""The most queries or keys that are shown."""


def add_parser(commands: Commands, help: str) -> None:
    """Add `mask` to the parser of `attn-dispatch`."""
    parser = add_command(
        commands, "mask", main, help=help, description=_DESCRIPTION, examples=_EXAMPLES,
        options=(
            option("--seq", "T[,S]", "the number of queries, and of keys if that differs",
                type=_numbers, required=True),
            option("--out", "FILE", "draw it to FILE.svg or FILE.png; needs matplotlib", type=Path),
        ),
    )  # fmt: skip
    call = parser.add_argument_group("arguments of the call")
    add_mask_flags(call)
    add_options(
        call,
        option("--lengths", "T[,S]",
            "real queries and keys: query_seq_lengths and key_value_seq_lengths", type=_numbers),
        option("--segments", "IDS", "1,1,2,2,0: query_segment_ids", type=_numbers),
        option("--key-segments", "IDS", "key_value_segment_ids, if they differ", type=_numbers),
        flag("--alibi", "show ALiBi's distances"),
        option("--mod", "MOD",
            "a ready-made mod and its numbers: 'chunked_window(4)', 'prefix_lm(3)', …", type=_mod),
    )  # fmt: skip


def main(args: argparse.Namespace) -> None:
    """Print the mask, or draw it into a file."""
    try:
        panel = _panel(args)
        text = _text(panel)
        if args.mod is not None and args.mod[0] == "score_mod":
            text += f"; a number is the result of {args.mod[2]} for a score of 0"
        if args.out is not None:
            _draw(panel, args.out)
    except (ModuleNotFoundError, OSError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error_text(error)}") from error
    if args.out is None:
        style.show(text, _MARKS)
    else:
        print(args.out)


_MARKS = {r"(?m)^ *\d+(?: +\d+)+$": style.QUIET, r"(?<=[\w. ])[._](?!\d)": style.QUIET}


def _panel(args: argparse.Namespace) -> Panel:
    queries, keys = _two("--seq", args.seq)
    if not 0 < max(queries, keys) <= _MAX_LENGTH or min(queries, keys) < 1:
        expected = f"expected 1 to {_MAX_LENGTH} queries and keys"
        raise ValueError(f"--seq: {expected}, got {queries} and {keys}")
    call: dict[str, Any] = {**given(args, MASK_FLAGS)}
    if args.lengths:
        both = _two("--lengths", args.lengths)
        call["query_seq_lengths"], call["key_value_seq_lengths"] = np.array(both)[:, None]
    for name, ids, length in (
        ("query", args.segments, queries), ("key_value", args.key_segments, keys)
    ):  # fmt: skip
        if ids:
            if len(ids) != length:
                raise ValueError(f"{name}_segment_ids: expected {length} ids, got {len(ids)}")
            call[f"{name}_segment_ids"] = np.array([ids])
    if args.alibi:
        call["alibi_slopes"] = np.ones(1, np.float32)
    if args.mod is not None:
        kind, mod, _ = args.mod
        call[kind] = mod
    _check(queries, keys, call)
    return Panel(_title(args, call), queries, keys, call)


def _title(args: argparse.Namespace, call: dict[str, Any]) -> str:
    """The call's arguments, without the values of segment ids, which label the picture's sides."""
    words = [f"{name}={call[name]!r}" for name in MASK_FLAGS if name in call]
    lengths = [f"{name}={call[name][0]}" for name in call if name.endswith("_lengths")]
    ids = [name for name in call if name.endswith("_segment_ids")]
    others = ["alibi_slopes"] * args.alibi
    if args.mod is not None:
        kind, _, written = args.mod
        others.append(f"{kind}={written}")
    return ", ".join([*words, *lengths, *ids, *others]) or "no mask"


def _check(queries: int, keys: int, call: dict[str, Any]) -> None:
    """Raise the errors of the call itself. A picture of a wrong call would show NaN as padding."""
    query, key = (jax.ShapeDtypeStruct((1, x, 1, 1), jnp.float32) for x in (queries, keys))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax.eval_shape(lambda q, k: dot_product_attention(q, k, k, **call), query, key)


def _text(panel: Panel) -> str:
    """A line for each query after its position, below a line with the positions of keys."""
    picture = panel.picture
    mask, padding = np.asarray(picture.mask), np.asarray(picture.padding)
    shown = np.full(mask.shape, "x", dtype=object)
    if picture.numbers is not None:
        shown = np.vectorize(shortened, otypes=[object])(np.asarray(picture.numbers))
    shown = np.where(mask, shown, np.where(padding, "_", "."))
    columns = [str(j) for j in range(panel.seq_len_kv)]
    size = max(len(x) for x in (*shown.flat, columns[-1]))
    label = len(str(panel.seq_len_q - 1))
    head, between = " ".join(x.rjust(size) for x in columns), " "
    if label + 1 + len(head) > width() and picture.numbers is None:
        # A letter for each key, and the position of every tenth key.
        head, between, size = "".join(x.ljust(10) for x in columns[::10]).rstrip(), "", 1
    lines = [" " * label + " " + head]
    for i, row in enumerate(shown):
        lines.append(str(i).rjust(label) + " " + between.join(x.rjust(size) for x in row))
    counted = f"{mask.sum()} of {mask.size} pairs attend ({mask.mean():.0%})"
    legend = ", _ is padding" if (padding & ~mask).any() else ""
    return "\n".join([*lines, "", counted + legend])


def _draw(panel: Panel, path: Path) -> None:
    try:
        from attn_dispatch_tools.pictures import drawing
    except ImportError:
        raise ModuleNotFoundError(
            "pictures are drawn with matplotlib: pip install matplotlib"
        ) from None
    drawing.draw(Figure(path.stem, ((panel,),)), path)


def _two(name: str, numbers: tuple[int, ...]) -> tuple[int, int]:
    """The numbers of queries and of keys. A single number is both."""
    if len(numbers) not in (1, 2):
        raise ValueError(f"{name}: expected one number or two, got {len(numbers)}")
    return numbers[0], numbers[-1]


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(x) for x in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers like 5,8, got {text!r}") from None


_TAKE_MODS = ("all_of", "any_of", "not_", "with_query_offset")
"""Functions of `mods` that take other mods, which a command line cannot express."""


def _mod(text: str) -> tuple[str, Any, str]:
    """(argument, mod, text) for a text like "chunked_window(4)": a function of `mods`, called with
    numbers."""
    expected = f"expected a mod like 'chunked_window(4)', got {text!r}"
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise argparse.ArgumentTypeError(expected)
        values = [_value(x) for x in call.args]
        by_name = {x.arg: _value(x.value) for x in call.keywords if x.arg}
    except (MemoryError, RecursionError, SyntaxError, ValueError):  # the first two: nested brackets
        raise argparse.ArgumentTypeError(expected) from None
    name = call.func.id
    if name not in (known := [x for x in mods.__all__ if x not in _TAKE_MODS]):
        meant = did_you_mean(name, known)
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, got {name!r}{meant}")
    try:
        mod = getattr(mods, name)(*values, **by_name)
    except (TypeError, ValueError) as error:
        reason = str(error).removeprefix(f"{name}() ").removeprefix(f"{name}: ")
        raise argparse.ArgumentTypeError(f"{name}: {reason}") from None
    has_score = len(inspect.signature(mod).parameters) == 5  # (score, b, n, t, s)
    return "score_mod" if has_score else "mask_mod", mod, text


def _value(node: ast.expr) -> Any:
    """A number; or a list of numbers as an array with an entry for each batch row."""
    value = ast.literal_eval(node)
    return np.array(value) if isinstance(value, list | tuple) else value
