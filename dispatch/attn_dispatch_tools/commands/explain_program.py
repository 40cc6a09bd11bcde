"""The `attn-dispatch explain-program` command: what would run the attention of a program."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, AxisType

from attn_dispatch.core import select
from attn_dispatch.text import error_text
from attn_dispatch.whole_programs import assert_kernels, explain_program
from attn_dispatch_tools.terminal import style
from attn_dispatch_tools.terminal.help import (
    VERBOSE,
    Commands,
    add_command,
    flag,
    one_name,
    option,
)
from attn_dispatch_tools.terminal.text import width
from attn_dispatch_tools.written_calls import notation

_DESCRIPTION = """\
List every attention call of a program: the line that makes it, how often it runs, and what would
run it, forward and backward. Attention that does not go through attn_dispatch is listed too. The
program is traced and never runs, and no GPU is needed: name a --target.

MODULE:FUNCTION is the program, in a module that Python can import from here. ARRAY is an argument
as dtype[shape], or as name=dtype[shape]. A function without arguments may make its model and
arrays itself: they are only traced, too.
"""
_EXAMPLES = (
    "attn-dispatch explain-program train:step_to_check --target h100",
    "attn-dispatch explain-program model:logits tokens=i32[8,4096] --target b200",
    "attn-dispatch explain-program train:step_to_check --target h100 --check",
)
_EXPECTED = "expected MODULE:FUNCTION like train:step"


def add_parser(commands: Commands, help: str) -> None:
    """Add `explain-program` to the parser of `attn-dispatch`."""
    add_command(
        commands, "explain-program", main, help=help, description=_DESCRIPTION,
        examples=_EXAMPLES,
        options=(
            option("program", "MODULE:FUNCTION", "the program"),
            option("arrays", "ARRAY", "its arguments, if it takes any", nargs="*"),
            option("--target", "DEVICE",
                "h100, b200, rtx4090, mi300x, sm90, … (default: the device that is here)"),
            option("--mesh", "AXES",
                "the mesh that is set while the program is traced, such as data=4,model=2"),
            flag("--check", "end with status 1 unless a vendor's kernel would run every attention"),
            flag("--allow-others",
                "with --check: allow attention that does not go through attn_dispatch"),
            option("--implementation", "NAME",
                "with --check: what may run attention, in place of every vendor's kernel: "
                f"{', '.join(select.names())}; may be repeated", type=one_name, action="append"),
            VERBOSE,
        ),
    )  # fmt: skip


def main(args: argparse.Namespace) -> None:
    """Print the list; ends the process with status 1 if a check fails."""
    try:
        mesh = None if args.mesh is None else _mesh(args.mesh)
        function, arrays = _call(_function(args.program), args.arrays)
        if args.check:
            explain = functools.partial(
                assert_kernels, allow_others=args.allow_others, implementations=args.implementation
            )
        elif args.allow_others or args.implementation:
            raise ValueError("--allow-others, --implementation: expected --check as well, got none")
        else:
            explain = explain_program
        found = explain(function, *arrays, target=args.target, mesh=mesh)
    except AssertionError as error:
        raise SystemExit(f"error: {error}") from error
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error_text(error)}") from error
    except SystemExit as stop:  # its status, often 0, is no result of a check
        raise SystemExit(
            f"error: {args.program} called sys.exit({stop.code!r}) while it was imported or traced "
            '(remedy: exit only under `if __name__ == "__main__":`)'
        ) from stop
    style.show(found.text(width(), codes=args.verbose), _MARKS)


_MARKS = {
    r"(?m)^(?:program|not through) .*": style.HEADING,
    r"(?m)^(?:device|planner|line|call|share|runs|forward|backward)\b": style.QUIET,
    r"(?m)^(?:forward|backward) +\w+ +(runs:)": style.GOOD,
    r"(?m)^(?:forward|backward) +\w+ +(cannot run:$|unknown:)": style.NOT,
}


def _function(name: str) -> Callable[..., object]:
    """The function that MODULE:FUNCTION names."""
    module, colon, function = name.partition(":")
    if not (colon and module and function):
        raise ValueError(f"{_EXPECTED}, got {name!r}")
    if os.sep in module or module.endswith(".py"):
        parts = Path(os.path.relpath(module)).with_suffix("").parts
        dotted = ".".join(x for x in parts if x != os.pardir)
        raise ValueError(
            f"{_EXPECTED}, got the path {module!r} (remedy: name the module, {dotted}:{function})"
        )
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # it is there, and imports another
            raise
        where = f"in {os.getcwd()} or elsewhere on Python's path"
        raise ValueError(f"{_EXPECTED}, got no module {module!r} {where}") from error
    for part in function.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{_EXPECTED}, got {name!r}, and {module} has no {function!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{_EXPECTED}, got {name!r}, a value of type {type(found).__name__}")
    return found


def _call(
    function: Callable[..., object], words: Sequence[str]
) -> tuple[Callable[..., object], list[jax.ShapeDtypeStruct]]:
    """A function of arrays alone, and the arrays."""
    names: list[str] = []
    arrays: list[jax.ShapeDtypeStruct] = []
    for word in words:
        name, text = word.split("=", 1) if "=" in word else ("", word)
        found = notation.array(text)
        if found is None:
            raise ValueError(f"ARRAY: expected an array like bf16[8,4096], got {word!r}")
        names.append(name)
        arrays.append(found)

    def words_of(arrays: Sequence[object]) -> tuple[list[object], dict[str, object]]:
        pairs = list(zip(names, arrays, strict=True))
        return [x for name, x in pairs if not name], {name: x for name, x in pairs if name}

    unnamed, named = words_of(arrays)
    try:
        inspect.signature(function).bind(*unnamed, **named)
    except ValueError:
        pass  # Python does not know the signatures of some functions in C
    except TypeError as error:
        remedy = "write its arrays as ARRAY, or name a function without arguments that calls it"
        raise ValueError(f"MODULE:FUNCTION: {error} (remedy: {remedy})") from error

    @functools.wraps(function)
    def program(*arrays: object) -> object:
        unnamed, named = words_of(arrays)
        return function(*unnamed, **named)

    return program, arrays


def _mesh(text: str) -> AbstractMesh:
    axes = re.findall(r"([A-Za-z_]\w*)=([1-9]\d*)", text)
    if ",".join(f"{name}={size}" for name, size in axes) != text.replace(" ", ""):
        raise ValueError(f"--mesh: expected axes like data=4,model=2, got {text!r}")
    sizes = tuple(int(size) for _, size in axes)
    if math.prod(sizes) < 2:
        raise ValueError(f"--mesh: expected several devices, got {text!r}")
    kinds = (AxisType.Auto,) * len(axes)
    return AbstractMesh(sizes, tuple(name for name, _ in axes), axis_types=kinds)
