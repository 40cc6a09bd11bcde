"""The names of the package: imported when the first is used, and no other than face.py's."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import attn_dispatch
from attn_dispatch import face

ROOMS = {"integrations", "mods", "serving"}


def test_the_lists_are_one():
    assert attn_dispatch.__all__ == face.__all__
    tree = ast.parse(Path(attn_dispatch.__file__).read_text())
    (block,) = (x for x in tree.body if isinstance(x, ast.If))  # what type checkers read
    assert isinstance(block.body[0], ast.ImportFrom)
    typed = {x.name for x in block.body[0].names}
    assert typed == {*attn_dispatch.__all__} - {"__version__"}


def test_every_name_is_what_the_face_has():
    for name in attn_dispatch.__all__:
        assert getattr(attn_dispatch, name) is getattr(face, name)
    assert set(attn_dispatch.__all__) <= set(dir(attn_dispatch))


def test_no_name_is_also_a_file():
    """`from attn_dispatch import NAME` would be the file, or the name, by what came first."""
    found = {x for x in attn_dispatch.__all__ if find_spec(f"attn_dispatch.{x}")}
    assert found == ROOMS


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'attn_dispatch' has no attribute 'attend'"):
        attn_dispatch.attend  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'attend'"):
        exec("from attn_dispatch import attend")


@pytest.mark.parametrize(
    "first",
    [
        "import attn_dispatch; attn_dispatch.settings.override",
        "from attn_dispatch import mods, settings",
        "from attn_dispatch.api import explain",
        "from attn_dispatch.devices import target",
        "import attn_dispatch.core.select",
        "import attn_dispatch.xla, attn_dispatch.implementation",
        "from attn_dispatch import *",
    ],
)
def test_any_room_may_be_the_first(first: str):
    """Each in a process of its own, and then the whole face."""
    code = f"{first}\nimport attn_dispatch\nattn_dispatch.target, attn_dispatch.serving"
    subprocess.run([sys.executable, "-c", code], check=True)
