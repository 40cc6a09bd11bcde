"""docs/notebook.ipynb runs in order, prints the outputs that it shows, and becomes a page.

Its cells are plain Python and are executed by `exec`: a Jupyter kernel would need a hundred more
packages. tests/scripts/notebook.py makes the outputs that are committed.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from typing import Any

import pytest

from tests.support.repository import DOCS

pytest.importorskip("matplotlib")

from tests.scripts.notebook import run

NOTEBOOK = json.loads((DOCS / "notebook.ipynb").read_text("utf-8"))
CELLS = [x for x in NOTEBOOK["cells"] if x["cell_type"] == "code"]
SMALLER = {
    "documents[:32]": "documents[:6]",
    "LONGEST = 512": "LONGEST = 128",
    "steps=12": "steps=2",
}


def described(outputs: list[dict[str, Any]]) -> list[str]:
    """Each output's text without its numbers; of others the kinds of their data."""
    texts = ("".join(x.get("text", [*x.get("data", ())])) for x in outputs)
    return [re.sub(r"[\d.,]+(e-\d+)?", "0", x) for x in texts]


def test_cells_print_what_the_notebook_shows(monkeypatch):
    """Numbers may differ, since the test trains on fewer documents."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    sources = ["".join(x["source"]) for x in CELLS]
    for old, new in SMALLER.items():
        assert sum(old in x for x in sources) == 1, old
        sources = [x.replace(old, new) for x in sources]
    names: dict[str, object] = {"__name__": "notebook"}
    for i, (source, cell) in enumerate(zip(sources, CELLS, strict=True)):
        found = run(source, f"cell {i}", names)
        assert described(found) == described(cell["outputs"])


def test_the_cells_were_executed_in_order():
    assert [x["execution_count"] for x in CELLS] == [*range(1, len(CELLS) + 1)]


def test_the_notebook_becomes_a_page_with_pictures(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    monkeypatch.delitem(sys.modules, "notebook", raising=False)
    import notebook

    markdown, pictures = notebook.page(json.dumps(NOTEBOOK))
    assert len(pictures) == 3 and all(x[1:4] == b"PNG" for x in pictures.values())
    assert re.findall(r"!\[(.+)\]\((.+)\)", markdown) == [
        ("documents against bytes", "notebook_0.png"),
        ("query against key", "notebook_1.png"),
        ("loss, nats per byte against step", "notebook_2.png"),
    ]
    assert markdown.count("```python\n") == len(CELLS)
    assert "```text\nlargest difference: " in markdown

    linked = notebook.on_page_markdown("[a](notebook.ipynb)", page=None, config={}, files=[])
    assert linked == "[a](notebook.md)"

    output = {"output_type": "error", "ename": "ValueError"}
    cell = {"cell_type": "code", "source": ["1 / 0"], "outputs": [output]}
    with pytest.raises(ValueError, match="no way to show error"):
        notebook.page(json.dumps({"cells": [cell]}))
    output = {"output_type": "display_data", "data": {"image/png": base64.b64encode(b"x").decode()}}
    cell |= {"outputs": [output]}
    assert notebook.page(json.dumps({"cells": [cell]}))[1] == {"notebook_0.png": b"x"}
