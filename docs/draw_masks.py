"""Draws docs/masks/*.svg, the pictures of docs/semantics.md and docs/mods.md.

    python docs/draw_masks.py

Needs matplotlib. The same version of matplotlib always writes the same bytes. Each file also holds
its picture as text (`Figure.text`), which the tests compare with the library.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mask_panels
import mod_panels

from attn_dispatch_tools.pictures import drawing
from attn_dispatch_tools.pictures.panel import Figure

FOLDER = Path(__file__).parent / "masks"


def draw(figure: Figure, folder: Path) -> Path:
    """Write one figure to `folder` and return its path."""
    path = folder / f"{figure.name}.svg"
    drawing.draw(figure, path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw docs/masks/*.svg.")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for each in (*mask_panels.FIGURES, *mod_panels.FIGURES):
        print(draw(each, folder))
