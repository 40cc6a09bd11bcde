"""SVG files of matplotlib made short, to keep pictures in a repository small.

They look the same.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

_LONG = re.compile(r"\d+\.\d{3,}")
_BROKEN = re.compile(r"\s*\n\s*")
_INDENTED = re.compile(r"\n +<")
_TAG = re.compile(r"<[^>]+>")
_ID = re.compile(r' id="([^"]+)"')
_REFERENCE = re.compile(r'(?<= id=")[^"]+|(?<=#)[\w-]+(?=[")])')
_DOCTYPE = re.compile(r"<!DOCTYPE[^>]*>\n")
_METADATA = re.compile(r"<metadata>.*?</metadata>\n", re.S)
_DESCRIPTION = re.compile(r"<dc:description>(.*?)</dc:description>", re.S)
_STYLE = re.compile(r'style="([^"]{12,})"')
_GROUP = re.compile(r"<g>\n((?:(?!</?g\b)[^\0])*?)</g>\n")
_RULES = "</style>"
_NO_TURN = re.compile(r' transform="rotate\(-?0 [^)]*\)"')
_DATA = re.compile(r'(?<= d=")[^"]+')
_DRAWN = re.compile(r"([A-Za-z])([^A-Za-z]*)")


def shorten(path: Path) -> None:
    """Shorten an SVG file.

    Numbers in tags are rounded to a hundredth of a point. Indentation, ids that nothing refers to,
    and groups that then say nothing go, and rotations by 0. Other ids become short. Styles that
    several elements have become classes, and lines along an axis have one number. Of matplotlib's
    metadata the description is left.
    """
    text = _INDENTED.sub("\n<", path.read_text(encoding="utf-8"))
    text = _TAG.sub(lambda tag: _LONG.sub(_rounded, _BROKEN.sub(" ", tag[0])), text)
    text = _ID.sub(lambda found: found[0] if f"#{found[1]}" in text else "", text)
    while (shorter := _GROUP.sub(r"\1", text)) != text:
        text = shorter
    names = {name: f"i{number}" for number, name in enumerate(_ID.findall(text))}
    text = _REFERENCE.sub(lambda found: names.get(found[0], found[0]), text)
    text = _METADATA.sub(_description, _DOCTYPE.sub("", text))
    text = _DATA.sub(_along_axes, _NO_TURN.sub("", text))
    path.write_text(_with_classes(text), encoding="utf-8")


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _description(metadata: re.Match[str]) -> str:
    found = _DESCRIPTION.search(metadata[0])
    return f"<desc>{found[1]}</desc>\n" if found else ""


def _along_axes(data: re.Match[str]) -> str:
    """The data of a path with absolute coordinates; x or y of a line is left out if it stays."""
    found, at = list[str](), ("", "")
    for letter, numbers in _DRAWN.findall(data[0]):
        values = numbers.split()
        if letter != "L" or len(values) != 2:
            found.append(letter + " ".join(values))
        elif values[1] == at[1]:
            found.append(f"H{values[0]}")
        elif values[0] == at[0]:
            found.append(f"V{values[1]}")
        else:
            found.append("L" + " ".join(values))
        at = (values[-2], values[-1]) if len(values) >= 2 else ("", "")
    return "".join(found)


def _with_classes(text: str) -> str:
    if _RULES not in text or 'class="' in text:
        return text
    often = [style for style, count in Counter(_STYLE.findall(text)).items() if count > 1]
    names = {style: f"c{number}" for number, style in enumerate(often)}
    rules = "".join(f".{name}{{{style}}}" for style, name in names.items())
    text = _STYLE.sub(lambda x: f'class="{names[x[1]]}"' if x[1] in names else x[0], text)
    return text.replace(_RULES, rules + _RULES, 1)
