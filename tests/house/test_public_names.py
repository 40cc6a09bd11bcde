"""The public names of the package, which public_names.py defines and the first use imports."""

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
SUBPACKAGES = {"integrations", "mods", "sequence", "serving"}


def test_the_package_has_the_names_of_public_names():
    assert attn_dispatch.__all__ is public_names.__all__  # pyright: ignore[reportAttributeAccessIssue]
    for name in public_names.__all__:
        assert getattr(attn_dispatch, name) is getattr(public_names, name)
    assert set(public_names.__all__) <= set(dir(attn_dispatch))


def test_every_public_name_is_documented():
    """Subpackages are documented on separate pages."""
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    documented = re.findall(r"^::: attn_dispatch\.(\w+)$", page, re.M)
    assert sorted([*documented, *SUBPACKAGES, "__version__"]) == sorted(public_names.__all__)
    for name in SUBPACKAGES:
        page = (ROOT / "docs" / f"api_{name}.md").read_text("utf-8")
        assert f"::: attn_dispatch.{name}" in page


@pytest.mark.parametrize("first", ["attn_dispatch", "attn_dispatch._version", "attn_dispatch.text"])
def test_importing_the_package_alone_does_not_import_jax(first: str):
    code = f"import sys, {first}; print([x for x in ('jax', 'numpy', 'rich') if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_no_public_name_is_the_name_of_a_module():
    """`from attn_dispatch import NAME` would depend on which was imported first."""
    found = {x for x in attn_dispatch.__all__ if find_spec(f"attn_dispatch.{x}")}  # pyright: ignore[reportAttributeAccessIssue]
    assert found == SUBPACKAGES


def test_a_name_that_does_not_exist_is_an_error():
    with pytest.raises(AttributeError, match="module 'attn_dispatch' has no attribute 'attend'"):
        attn_dispatch.attend  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="has no attribute '_attend'"):
        attn_dispatch._attend  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="did you mean 'dot_product_attention'"):
        attn_dispatch.dot_product_atention  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]
    for name in ("attention", "flash_attention", "multi_head_attention"):
        with pytest.raises(AttributeError, match=f"{name}'; did you mean 'dot_product_attention'"):
            getattr(attn_dispatch, name)
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
def test_any_subpackage_may_be_imported_first(first: str):
    """Each import runs in a new process, followed by uses of public names."""
    code = f"{first}\nimport attn_dispatch\nattn_dispatch.target, attn_dispatch.serving"
    subprocess.run([sys.executable, "-c", code], check=True)
