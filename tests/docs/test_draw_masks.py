"""The pictures of masks in the docs agree with the results of calls and are up to date."""

from __future__ import annotations

import importlib
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jax
import numpy as np
import pytest

from attn_dispatch import dot_product_attention
from attn_dispatch.call.arguments import ARRAY_ARGUMENTS
from tests.support.repository import DOCS

sys.path.append(str(DOCS))
import mask_panels
import mod_panels

PAGES = {"semantics.md": mask_panels.FIGURES, "mods.md": mod_panels.FIGURES}
FIGURES = {figure.name: figure for figures in PAGES.values() for figure in figures}
PANELS = {
    f"{figure.name}: {panel.title}": panel
    for figure in FIGURES.values()
    for row in figure.rows
    for panel in row
}


@pytest.mark.parametrize("name", PANELS)
def test_a_call_attends_the_pairs_in_its_picture(name: str):
    panel = PANELS[name]
    call = panel.call()
    arrays = {x: call.pop(x) for x in ARRAY_ARGUMENTS if x in call}

    @jax.jit
    def attend(arrays):
        return dot_product_attention(**arrays, **call, return_lse=True, implementation="xla")

    # The values are unit vectors, so the output is the probabilities.
    p, lse = (np.asarray(x)[0, :, panel.head] for x in attend(arrays))
    mask = np.asarray(panel.picture.mask)
    np.testing.assert_array_equal(p > 0, mask)
    scores = np.zeros(mask.shape)
    if panel.picture.numbers is not None:
        sign = -1 if "alibi_slopes" in arrays else 1
        scores = sign * np.asarray(panel.picture.numbers)
    rows, columns = np.nonzero(mask)
    np.testing.assert_allclose(np.log(p[mask]) + lse[rows], scores[rows, columns], atol=1e-5)


@pytest.mark.parametrize("name", FIGURES)
def test_committed_pictures_are_up_to_date(name: str):
    assert _description(DOCS / "masks" / f"{name}.svg") == FIGURES[name].text()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_as_committed(name: str, tmp_path: Path):
    matplotlib = pytest.importorskip("matplotlib")
    drawn = importlib.import_module("draw_masks").draw(FIGURES[name], tmp_path)
    assert _description(drawn) == FIGURES[name].text()
    committed = DOCS / "masks" / drawn.name
    if f"Matplotlib v{matplotlib.__version__}," in committed.read_text("utf-8"):
        assert drawn.read_bytes() == committed.read_bytes()


def test_each_picture_is_shown_on_its_page():
    assert {path.stem for path in (DOCS / "masks").glob("*.svg")} == FIGURES.keys()
    for name, figures in PAGES.items():
        page = (DOCS / name).read_text("utf-8")
        shown = {figure for figure in FIGURES if f"(masks/{figure}.svg)" in page}
        assert shown == {figure.name for figure in figures}, name


def _description(path: Path) -> str:
    """A picture's description."""
    found = ElementTree.parse(path).find("{http://www.w3.org/2000/svg}desc")
    assert found is not None and found.text is not None
    return found.text
