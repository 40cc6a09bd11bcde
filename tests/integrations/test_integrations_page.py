"""The examples of docs/integrations.md run and are short."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest

from tests.support.repository import DOCS, ROOT

os.environ.setdefault("KERAS_BACKEND", "jax")

PAGE = (DOCS / "integrations.md").read_text()
EXAMPLES = re.findall(r"^## ([^\n]+)|^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FRAMEWORKS = ("flax", "equinox", "haiku", "keras", "penzai")


def examples() -> list[tuple[str, str]]:
    found, title = [], ""
    for heading, code in EXAMPLES:
        title = heading or title
        if code:
            found.append((title, code))
    return found


@pytest.mark.parametrize("file", ["older.txt", "oldest.txt"])
def test_the_page_names_the_older_versions_that_are_tested(file: str):
    pins = Path(__file__).with_name(file).read_text()
    names = {"flax": "Flax", "equinox": "Equinox", "dm-haiku": "Haiku", "keras": "Keras",
             "penzai": "Penzai", "optax": "optax", "jax": "JAX"}  # fmt: skip
    words = " ".join(PAGE.split())
    for name, shown in names.items():
        (version,) = re.findall(rf"^{name}==(\S+)$", pins, re.M)
        assert f"{shown} {version}" in words


def test_each_integration_has_an_example():
    files = ROOT / "dispatch" / "attn_dispatch" / "integrations"
    code = "".join(code for _, code in examples())
    for name in FRAMEWORKS:
        assert (files / f"{name}.py").exists() or (files / name / "__init__.py").exists()
        assert f"from attn_dispatch.integrations.{name} import" in code
    assert "patch_jax_nn" in code


@pytest.mark.parametrize("title", ["Flax", "Equinox", "Penzai"])
def test_an_example_replaces_the_attention_of_a_whole_model(title: str):
    assert any(
        "replace_attention(model" in code for heading, code in examples() if heading == title
    )


@pytest.mark.parametrize(("title", "code"), examples(), ids=lambda x: x.split("\n")[0])
def test_an_example_runs(title: str, code: str):
    for name in FRAMEWORKS:
        if re.search(rf"integrations\.{name} |^from {name}\b", code, re.M):
            pytest.importorskip(name)
    lines = [x for x in code.splitlines() if x and not x.startswith(("import ", "from "))]
    assert len(lines) <= 10
    scope: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(code, title, "exec"), scope)
    assert "out" in scope
