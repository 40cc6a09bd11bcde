from pathlib import Path

from attn_dispatch_tools.reports.svg_file import shorten


def test_long_numbers_are_rounded_and_others_stay(tmp_path: Path):
    path = tmp_path / "a.svg"
    path.write_text('<g>\n   <path d="M 1.0049 -2.3456789 L 3.999999 7.25 10"/> 1.23456')
    shorten(path)
    assert path.read_text() == '<g>\n<path d="M 1 -2.35 L 4 7.25 10"/> 1.23456'
