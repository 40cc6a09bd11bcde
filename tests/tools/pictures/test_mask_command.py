"""`attn-dispatch mask`: its text and pictures, compared with the results of the call."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, mods
from attn_dispatch_tools import cli


@pytest.fixture
def mask(capsys):
    def run(*words: str) -> str:
        cli.main(["mask", *words])
        return capsys.readouterr().out

    return run


def attends(text: str) -> np.ndarray:
    """The mask in a text, bool [T, S]: True for every character except . and _."""
    rows = [line.split()[1:] for line in text.partition("\n\n")[0].splitlines()[1:]]
    return np.array([[x not in "._" for x in row] for row in rows])


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("--seq 16 --causal --window 4", {"is_causal": True, "local_window_size": 4}),
        ("--seq 6 --window 0", {"local_window_size": 0}),
        ("--seq 5,8 --causal --bottom-right",
         {"is_causal": True, "causal_alignment": "bottom_right"}),
        ("--seq 8,5 --window 2,none --bottom-right",
         {"local_window_size": (2, None), "causal_alignment": "bottom_right"}),
        ("--seq 5,8 --lengths 4,6 --causal",
         {"is_causal": True, "query_seq_lengths": [4], "key_value_seq_lengths": [6]}),
        ("--seq 8 --segments 1,1,1,2,2,3,3,0 --causal",
         {"is_causal": True, "query_segment_ids": [[1, 1, 1, 2, 2, 3, 3, 0]]}),
        ("--seq 3,4 --segments 1,2,2 --key-segments 1,1,2,0",
         {"query_segment_ids": [[1, 2, 2]], "key_value_segment_ids": [[1, 1, 2, 0]]}),
        ("--seq 12 --mod chunked_window(4)", {"mask_mod": mods.chunked_window(4)}),
        ("--seq 8 --mod prefix_lm(3)", {"mask_mod": mods.prefix_lm(np.array([3]))}),
        ("--seq 9 --mod dilated_window(left=6,dilation=2)",
         {"mask_mod": mods.dilated_window(6, 2)}),
    ],
)  # fmt: skip
def test_the_text_shows_the_pairs_that_the_call_attends(mask, words: str, call: dict):
    shown = attends(text := mask(*words.split()))
    queries, keys = shown.shape
    query, key = (jnp.zeros((1, n, 1, 1)) for n in (queries, keys))
    value = jnp.eye(keys)[None, :, None]
    call = {x: np.array(y) if isinstance(y, list) else y for x, y in call.items()}
    p = dot_product_attention(query, key, value, **call, implementation="xla")
    np.testing.assert_array_equal(np.asarray(p)[0, :, 0] > 0, shown)
    assert f"{shown.sum()} of {shown.size} pairs attend" in text


def test_the_text_has_labels_padding_and_a_count(mask):
    assert mask("--seq", "3,4", "--causal", "--lengths", "3,3") == (
        "  0 1 2 3\n0 x . . _\n1 x x . _\n2 x x x _\n\n6 of 12 pairs attend (50%), _ is padding\n"
    )
    assert mask("--seq", "2").endswith("\n4 of 4 pairs attend (100%)\n")
    assert mask("--seq", "3", "--alibi").splitlines()[3] == "2 2 1 0"
    assert "1.2" in (text := mask("--seq", "12", "--mod", "alibi([1.2])"))
    assert text.endswith("(100%); a number is the result of alibi([1.2]) for a score of 0\n")


def test_a_wide_mask_fits_the_terminal(mask, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = mask("--seq", "2,70", "--window", "5,20").splitlines()
    assert lines[:3] == [
        "  " + "".join(str(j).ljust(10) for j in range(0, 70, 10)).rstrip(),
        "0 " + "x" * 21 + "." * 49,
        "1 " + "x" * 22 + "." * 48,
    ]


def test_pictures_are_written_as_svg_and_png(mask, tmp_path: Path):
    pytest.importorskip("matplotlib")
    for name, begins in (("a.svg", b"<?xml"), ("a.PNG", b"\x89PNG")):
        file = tmp_path / name
        assert mask("--seq", "6", "--causal", "--out", str(file)) == f"{file}\n"
        assert file.read_bytes().startswith(begins)
    drawn = (tmp_path / "a.svg").read_text()
    assert "is_causal=True" in drawn and "\nx.....\nxx....\n" in drawn


@pytest.mark.parametrize(
    ("words", "title", "labels"),
    [
        ("", "no mask", "0123" * 2),
        ("--window 2,none --bottom-right",
         "causal_alignment='bottom_right', local_window_size=(2, None)", "0123" * 2),
        ("--lengths 3,2 --alibi --causal",
         "is_causal=True, query_seq_lengths=3, key_value_seq_lengths=2, alibi_slopes", "0123" * 2),
        ("--segments 1,2,2,0", "query_segment_ids", "1220" * 2),
        ("--segments 1,1,2,2 --key-segments 1,2,2,0",
         "query_segment_ids, key_value_segment_ids", "1122" "1220"),
        ("--mod chunked_window(2)", "mask_mod=chunked_window(2)", "0123" * 2),
    ],
)  # fmt: skip
def test_a_picture_shows_the_arguments_and_the_ids(
    mask, tmp_path: Path, words: str, title: str, labels: str
):
    """The title shows the call's arguments; the sides show ids or positions."""
    pytest.importorskip("matplotlib")
    mask("--seq", "4", "--out", str(tmp_path / "a.svg"), *words.split())
    root = ET.fromstring((tmp_path / "a.svg").read_text())
    texts = ["".join(x.itertext()) for x in root.iter("{http://www.w3.org/2000/svg}text")]
    shown = [x for x in texts if not x.isdigit()]
    assert shown == [title]
    if "--alibi" not in words:  # ALiBi puts numbers into the picture
        assert "".join(x for x in texts if x.isdigit()) == labels


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seq 0", "--seq: expected 1 to 512 queries and keys, got 0 and 0"),
        ("--seq 1000", "--seq: expected 1 to 512"),
        ("--seq 1,2,3", "--seq: expected one number or two, got 3"),
        ("--seq 4 --segments 1,1", "query_segment_ids: expected 4 ids, got 2"),
        ("--seq 4 --lengths 5", "query_seq_lengths: expected lengths from 0 to 4, got 5"),
        ("--seq 4 --window -1,-1", "local_window_size: expected a non-negative int or a pair"),
        ("--seq 4,3 --segments 1,1,1,1", "segment ids: expected both query_segment_ids and"),
        ("--seq 4 --segments 1,-1,1,1", "query_segment_ids: expected ids of 0 (padding) and above"),
        ("--seq 4 --out x.gif", "expected a file that ends with .svg or .png, got x.gif"),
    ],
)
def test_wrong_arguments_are_errors(words: str, message: str, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as status:
        cli.main(["mask", *words.split()])
    assert str(status.value).startswith(f"error: {message}")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        ("chunked_window", "expected a mod like 'chunked_window(4)', got 'chunked_window'"),
        ("chunked_windows(4)", "expected one of "),
        ("chunked_window(-1)", "chunked_window: "),
        ("chunked_window(4", "expected a mod like"),
        ("chunked_window()", "--mod: chunked_window: missing 1 required positional argument: 'ch"),
        ("chunked_window(open('x'))", "expected a mod like"),
        ("__import__('os')", "expected"),
        (f"chunked_window({'-' * 3000}4)", "expected a mod like"),
    ],
)
def test_a_wrong_mod_is_refused(mod: str, message: str, capsys):
    with pytest.raises(SystemExit):
        cli.main(["mask", "--seq", "4", "--mod", mod])
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_error_names_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "attn_dispatch_tools.pictures.drawing", None)
    monkeypatch.delattr("attn_dispatch_tools.pictures.drawing", raising=False)
    with pytest.raises(SystemExit, match="pictures are drawn with matplotlib: pip install mat"):
        cli.main(["mask", "--seq", "4", "--out", str(tmp_path / "a.svg")])


def test_a_picture_of_too_many_numbers_is_refused(tmp_path):
    """512 x 512 numbers would take minutes and 2.6 GB."""
    words = ["mask", "--seq", "200", "--alibi", "--out", str(tmp_path / "mask.png")]
    with pytest.raises(SystemExit, match="expected at most 16,384 numbers to draw, got 40,000"):
        cli.main(words)
