"""The line of the user's program that an operation comes from."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from attn_dispatch.core.jax_compat import frames_of
from attn_dispatch.warning import is_outside

_FRAMEWORKS = ("equinox", "flax", "haiku", "keras", "penzai")
"""Packages whose layers call attention for their users."""

_INSTALLED = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib", "platstdlib")}
)


@dataclass(frozen=True)
class Place:
    """Where a program makes a call."""

    file: str
    line: int
    function: str
    called_from: tuple[str, int] | None = None
    """If the file is of an installed package: the file and line that led there."""
    layer: str = ""
    """The method of a framework between this line and the call: "flax's Attention.__call__"."""

    def __str__(self) -> str:
        text = f"{_shown(self.file)}:{self.line}, in {self.function}"
        if self.layer:
            text += f", through {self.layer}"
        if self.called_from is not None:
            file, line = self.called_from
            text += f", called from {_shown(file)}:{line}"
        return text


def place_of(equation: JaxprEqn) -> Place | None:
    """The line outside JAX, this package and frameworks that an operation comes from."""
    frames = frames_of(equation)
    outside = [x for x in frames if is_outside(x[0])]
    users = [x for x in outside if not _framework(x[0])] or outside
    if not users:
        return None
    file, line, function = users[0]
    own = next((x for x in users if not x[0].startswith(_INSTALLED)), users[0])
    inside = frames[: frames.index(users[0])]
    methods = [x for x in inside if "." in x[2] and "<locals>" not in x[2]]
    layers = [x for x in methods if _framework(x[0])]
    called_from = None if own == users[0] else own[:2]
    layer = f"{_framework(layers[0][0])}'s {layers[0][2]}" if layers else ""
    return Place(file, line, function, called_from, layer)


def is_of_our_call(equation: JaxprEqn) -> bool:
    """Whether this package made the operation, such as those of a derivative by formulas."""
    files = (file for file, _, _ in frames_of(equation))
    innermost = next((x for x in files if not x.startswith(_folder("jax"))), "")
    return innermost.startswith(_folder("attn_dispatch"))


def _framework(file: str) -> str:
    """The name of the framework that a file belongs to; "" if it belongs to none."""
    return next((x for x in _FRAMEWORKS if file.startswith(_folder(x))), "")


def _folder(package: str) -> str:
    file = getattr(sys.modules.get(package), "__file__", None)
    # No file is in a package that is not imported.
    return os.path.dirname(file) + os.sep if file else "\0"


def _shown(file: str) -> str:
    """The path from the current folder, if the file is below it."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
