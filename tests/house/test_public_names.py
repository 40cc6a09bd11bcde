"""The names of the package: those of public_names.py, which is imported when the first is used."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import attn_dispatch
from attn_dispatch import public_names

ROOT = Path(__file__).parents[2]
ROOMS = {"integrations", "mods", "serving"}


def test_every_name_is_that_of_the_list():
    assert attn_dispatch.__all__ is public_names.__all__  # pyright: ignore[reportAttributeAccessIssue]
    for name in public_names.__all__:
        assert getattr(attn_dispatch, name) is getattr(public_names, name)
    assert set(public_names.__all__) <= set(dir(attn_dispatch))


def test_every_name_has_its_place_in_the_docs_of_the_api():
    """Rooms have pages of their own."""
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    documented = re.findall(r"^::: attn_dispatch\.(\w+)$", page, re.M)
    assert sorted([*documented, *ROOMS, "__version__"]) == sorted(public_names.__all__)
    for room in ROOMS:
        page = (ROOT / "docs" / f"api_{room}.md").read_text("utf-8")
        assert f"::: attn_dispatch.{room}" in page


@pytest.mark.parametrize("first", ["attn_dispatch", "attn_dispatch._version", "attn_dispatch.text"])
def test_a_package_of_which_no_name_is_used_imports_nothing(first: str):
    code = f"import sys, {first}; print([x for x in ('jax', 'numpy', 'rich') if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_no_name_is_also_a_file():
    """`from attn_dispatch import NAME` would be the file, or the name, by what came first."""
    found = {x for x in attn_dispatch.__all__ if find_spec(f"attn_dispatch.{x}")}  # pyright: ignore[reportAttributeAccessIssue]
    assert found == ROOMS


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'attn_dispatch' has no attribute 'attend'"):
        attn_dispatch.attend  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="has no attribute '_attend'"):
        attn_dispatch._attend  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError, match="cannot import name 'attend'"):
        exec("from attn_dispatch import attend")


@pytest.mark.parametrize(
    "first",
    [
        "import attn_dispatch; attn_dispatch.settings.restored",
        "from attn_dispatch import mods, settings",
        "from attn_dispatch.inspection import explain",
        "from attn_dispatch.devices import target",
        "import attn_dispatch.core.select",
        "import attn_dispatch.xla, attn_dispatch.implementation",
        "from attn_dispatch import *",
    ],
)
def test_any_room_may_be_the_first(first: str):
    """Each in its own process, and then all public names."""
    code = f"{first}\nimport attn_dispatch\nattn_dispatch.target, attn_dispatch.serving"
    subprocess.run([sys.executable, "-c", code], check=True)
