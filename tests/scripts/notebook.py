"""Runs docs/notebook.ipynb from top to bottom, without Jupyter, and writes its outputs into it.

usage: python -m tests.scripts.notebook

A cell whose last line is `figure` has that figure as a picture.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from typing import Any

import matplotlib as mpl
from PIL import Image

from tests.support.repository import DOCS

NOTEBOOK = DOCS / "notebook.ipynb"


def run(source: str, name: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell with these names, and return its outputs in the format of notebooks."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, name, "exec"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        lines = text.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if source.endswith("\nfigure"):
        png = io.BytesIO()
        names["figure"].savefig(png, format="png", dpi=100)
        data = {"image/png": base64.b64encode(_in_256_colours(png)).decode()}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def _in_256_colours(png: io.BytesIO) -> bytes:
    """The picture with a palette, at less than half of its size."""
    small = io.BytesIO()
    Image.open(png).convert("RGB").quantize().save(small, format="PNG", optimize=True)
    return small.getvalue()


def main() -> None:
    mpl.use("Agg")
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    names: dict[str, Any] = {"__name__": "notebook"}
    cells = [x for x in notebook["cells"] if x["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        outputs = run("".join(cell["source"]), f"cell {number}", names)
        cell |= {"outputs": outputs, "execution_count": number}
        printed = (line.rstrip("\n") for x in outputs for line in x.get("text", ()))
        print(f"cell {number}", *printed, sep="\n  ", flush=True)
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    NOTEBOOK.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
