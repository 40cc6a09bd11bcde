"""Names from a list: the check of a choice, and the name that a similar one was meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar, cast

Choice = TypeVar("Choice", bound=str)

_NO_WORDS: Mapping[str, str] = MappingProxyType({})

_LIKENESS = 0.65


def check_choice(
    name: str,
    value: object,
    choices: tuple[Choice, ...],
    others: Mapping[str, str] = _NO_WORDS,
    likeness: float = _LIKENESS,
) -> Choice:
    """The value, one of the choices for the argument or variable of this name.

    Raises:
      ValueError: it is none of them; the message has the one that was probably meant, if any. For
        `others` and `likeness` see `did_you_mean`.
    """
    if not isinstance(value, str) or value not in choices:
        meant = did_you_mean(value, choices, others, likeness)
        raise ValueError(f"{name}: expected one of {choices}, got {value!r}{meant}")
    return cast("Choice", value)


def did_you_mean(
    given: object,
    known: Iterable[str],
    others: Mapping[str, str] = _NO_WORDS,
    likeness: float = _LIKENESS,
) -> str:
    """The end of a message about an unknown name: "; did you mean 'cudnn'?", or nothing.

    Args:
      given: the unknown name; for anything but a text there is no hint.
      known: the names that exist. Case, spaces, hyphens and underscores do not tell names apart.
      others: what people also say, in lower case without those characters, and the name here, or
        a sentence that follows "; ".
      likeness: difflib's ratio from which names count as similar; 1 for equal ones alone.
    """
    if not isinstance(given, str):
        return ""
    names = {_folded(name): name for name in known} | dict(others)
    near = difflib.get_close_matches(_folded(given), names, n=1, cutoff=likeness)
    if not near:
        return ""
    meant = names[near[0]]
    return f"; {meant}" if " " in meant else f"; did you mean {meant!r}?"


def missing(
    module: str, name: str, known: Iterable[str], others: Mapping[str, str] = _NO_WORDS
) -> AttributeError:
    """The error for a name that a module does not have, with the one that was probably meant."""
    meant = "" if name.startswith("_") else did_you_mean(name, known, others)
    return AttributeError(f"module {module!r} has no attribute {name!r}{meant}")


def _folded(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name.lower())
