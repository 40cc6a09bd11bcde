from pathlib import Path

from attn_dispatch_tools.reports.svg_file import shorten


def test_long_numbers_are_rounded_and_others_stay(tmp_path: Path):
    path = tmp_path / "a.svg"
    path.write_text('<g>\n   <path d="M 1.0049 -2.3456789 L 3.999999 7.25 10"/> 1.23456')
    shorten(path)
    assert path.read_text() == '<g>\n<path d="M1 -2.35L4 7.25 10"/> 1.23456'


SVG = """<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "svg11.dtd">
<svg>
 <metadata>
  <cc:Work>
   <dc:description>x..
.x.</dc:description>
   <dc:format>image/svg+xml</dc:format>
  </cc:Work>
 </metadata>
<defs>
  <style type="text/css">*{stroke-linecap: butt}</style>
</defs>
  <g id="patch_1">
    <g id="axes_1">
      <path id="m1" d="M 0 0
L 1 2
" style="fill: #ffffff; stroke: none"/>
    </g>
  </g>
  <use xlink:href="#m1" style="fill: #ffffff; stroke: none"/>
  <g clip-path="url(#m1)"><text style="fill: #000000; stroke: none" transform="rotate(-0 5 1.5)">a
b</text></g>
</svg>
"""
SHORT = """<svg>
<desc>x..
.x.</desc>
<defs>
<style type="text/css">*{stroke-linecap: butt}.c0{fill: #ffffff; stroke: none}</style>
</defs>
<path id="i0" d="M0 0L1 2" class="c0"/>
<use xlink:href="#i0" class="c0"/>
<g clip-path="url(#i0)"><text style="fill: #000000; stroke: none">a
b</text></g>
</svg>
"""


def test_what_says_nothing_goes_and_styles_become_classes(tmp_path: Path):
    path = tmp_path / "a.svg"
    path.write_text(SVG)
    shorten(path)
    assert path.read_text() == SHORT
    shorten(path)
    assert path.read_text() == SHORT


def test_metadata_without_a_description_goes(tmp_path: Path):
    path = tmp_path / "a.svg"
    path.write_text("<svg>\n<metadata>\n<dc:format>image/svg+xml</dc:format>\n</metadata>\n</svg>")
    shorten(path)
    assert path.read_text() == "<svg>\n</svg>"


def test_lines_along_an_axis_have_one_number(tmp_path: Path):
    path = tmp_path / "a.svg"
    path.write_text('<path d="M 1 2 L 3 2 L 3 4 L 1 4 z M 5 2 C 1 1 2 2 3 2 L 3 9 L 4 10 z "/>')
    shorten(path)
    assert path.read_text() == '<path d="M1 2H3V4H1zM5 2C1 1 2 2 3 2V9L4 10z"/>'
