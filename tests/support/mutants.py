"""Modules with a mistake, to show that tests notice it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def mutant(module: ModuleType, text: str, wrong: str) -> ModuleType:
    """The module with other text in place of a text that it has."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert text in source
    found = ModuleType(module.__name__)
    found.__file__ = module.__file__
    exec(compile(source.replace(text, wrong), f"{text} -> {wrong}", "exec"), vars(found))
    return found


def fails(check: Callable[[], None]) -> bool:
    """Whether the check notices something: an assertion fails, or arrays do not fit."""
    try:
        check()
    except (AssertionError, TypeError, ValueError):
        return True
    return False
