"""The score_mods of --mod, as variants that kernels are compiled with."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable
from typing import cast

from attn_dispatch.fa4.score_variant import MOST_ARRAYS, ScoreChange, variant_of
from attn_dispatch.programs.functions import ScoreMod
from attn_dispatch.programs.known_forms import known_form
from attn_dispatch.programs.nodes import Unsupported
from attn_dispatch.programs.program import ModProgram
from attn_dispatch.programs.tracing import trace
from attn_dispatch.text import error_text
from attn_dispatch_tools.build_fa4.sets import Variant
from attn_dispatch_tools.terminal.building import BuildError

_EXAMPLES = "my_model:score_mod or 'attn_dispatch.mods:soft_cap(50)'"


def variant(text: str) -> Variant:
    """The variant of a score_mod, MODULE:FUNCTION or MODULE:FUNCTION(ARGUMENTS).

    Raises:
      BuildError: there is none, or kernels cannot compute it. The message says why.
    """
    try:
        return _variant(text)
    except BuildError:
        raise
    except Exception as error:  # the user's code may raise any
        raise BuildError(f"--mod {text}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """The error's class, without which a KeyError says little, and its first line."""
    lines = error_text(error).strip().splitlines()
    return ": ".join((type(error).__name__, *lines[:1]))


def _variant(text: str) -> Variant:
    function = _function(text)
    try:
        change = _change(trace("score_mod", function, (), "float32").program)
        found = variant_of(change)
    except Unsupported as error:
        where = f" (at {error.line})" if error.line else ""
        raise BuildError(f"--mod {text}: {error.text}{where}") from error
    except ValueError as error:
        raise BuildError(f"--mod {text}: {error}") from error
    if len(found.types) > MOST_ARRAYS:
        raise BuildError(f"--mod {text}: reads {len(found.types)} arrays, of at most {MOST_ARRAYS}")
    is_small = change == ScoreChange(soft_cap=change.soft_cap)
    return Variant(text, found.digest, found.forward, found.backward, found.types, is_small)


def _change(program: ModProgram) -> ScoreChange:
    """The change of a call with this score_mod, or with the arguments that do the same.

    Calls with a soft cap or ALiBi reach kernels as these arguments.
    """
    form = known_form(program)
    if form is not None and form.soft_cap is not None and not form.adds:
        return ScoreChange(soft_cap=form.soft_cap)
    slopes = None if form is None or form.soft_cap is not None else form.slopes
    if slopes is not None and not slopes.is_one_sided and slopes.values.axes in ("n", ""):
        return ScoreChange(has_slopes=True)
    return ScoreChange(score_mod=program)


def _function(text: str) -> ScoreMod:
    """The object that a text names, or what its function returns for the given arguments."""
    module, _, expression = text.partition(":")
    try:
        path, arguments, options = _parsed(expression)
    except (SyntaxError, ValueError) as error:
        raise BuildError(
            f"--mod: expected MODULE:FUNCTION, such as {_EXAMPLES}, got {text!r}"
        ) from error
    found = _imported(text, module)
    try:
        for name in path:
            found = getattr(found, name)
        if arguments is not None:
            found = cast("Callable[..., object]", found)(*arguments, **options)
    except (AttributeError, TypeError, ValueError) as error:
        raise BuildError(f"--mod {text}: {error}") from error
    return cast("ScoreMod", found)  # which `trace` checks


def _parsed(expression: str) -> tuple[list[str], list[object] | None, dict[str, object]]:
    """The names of a.b, and the arguments of a.b(1, c=2); None if it is no call."""
    parsed = ast.parse(expression.strip(), mode="eval").body
    if not isinstance(parsed, ast.Call):
        return _path(parsed), None, {}
    arguments = [cast("object", ast.literal_eval(x)) for x in parsed.args]
    options = {x.arg or "**": cast("object", ast.literal_eval(x.value)) for x in parsed.keywords}
    return _path(parsed.func), arguments, options


def _path(node: ast.expr) -> list[str]:
    """The names of a, a.b or a.b.c."""
    if isinstance(node, ast.Attribute):
        return [*_path(node.value), node.attr]
    if not isinstance(node, ast.Name):
        raise ValueError("neither a name nor a call of one")
    return [node.id]


def _imported(text: str, module: str) -> object:
    """The module, also one in the current folder."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BuildError(f"--mod {text}: {error}") from error
    except ValueError as error:
        raise BuildError(
            f"--mod: expected MODULE:FUNCTION, such as {_EXAMPLES}, got {text!r}"
        ) from error
