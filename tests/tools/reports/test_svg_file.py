from pathlib import Path

from attn_dispatch_tools.reports.svg_file import shorten_numbers


def test_long_numbers_are_rounded_and_others_stay(tmp_path: Path):
    path = tmp_path / "a.svg"
    path.write_text('<path d="M 1.0049 -2.3456789 L 3.999999 7.25 10"/> v3.11.2')
    shorten_numbers(path)
    assert path.read_text() == '<path d="M 1 -2.35 L 4 7.25 10"/> v3.11.2'
