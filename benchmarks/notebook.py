"""Run docs/notebook.ipynb from top to bottom, without Jupyter, and print what its cells print.

usage: python benchmarks/notebook.py [--out FOLDER] [--write]

--out writes the output and the environment into a folder; --write writes the output into the
notebook. A cell whose last line is `figure` has that figure as a picture.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
from command import save
from PIL import Image

from attn_dispatch_tools.reports.environment import environment

NOTEBOOK = Path(__file__).parents[1] / "docs/notebook.ipynb"


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("--write", action="store_true", help="write outputs into the notebook")
    args = parser.parse_args()

    mpl.use("Agg")
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    names: dict[str, Any] = {"__name__": "notebook"}
    rows: list[dict[str, Any]] = []
    for cell in (x for x in notebook["cells"] if x["cell_type"] == "code"):
        number = len(rows) + 1
        started = time.perf_counter()
        outputs = run("".join(cell["source"]), f"cell {number}", names)
        seconds = time.perf_counter() - started
        printed = [line.rstrip("\n") for x in outputs for line in x.get("text", ())]
        print(f"cell {number}, {seconds:.1f} s", *printed, sep="\n  ", flush=True)
        rows.append({"cell": number, "seconds": round(seconds, 3), "printed": printed})
        cell |= {"outputs": outputs, "execution_count": number}
    save("notebook", {"environment": environment(), "cells": rows}, args.out)
    if args.write:
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        NOTEBOOK.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
