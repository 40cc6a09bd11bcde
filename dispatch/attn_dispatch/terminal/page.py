"""A report as one HTML file that needs nothing else: its Markdown, and plots inside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

_STYLE = """\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; }
th, td { border-bottom: 1px solid #8884; padding: .25rem .7rem; }
pre { background: #8881; overflow-x: auto; padding: .7rem; }
.plot { margin: 1rem 0; overflow-x: auto; }
img { background: #fff; display: block; max-width: 100%; min-width: 38rem; }
"""


NO_MATPLOTLIB = "plots are drawn with matplotlib: pip install matplotlib, or the extra [bench]"


def page(markdown: str, pictures: Sequence[Path] = ()) -> str:
    """The whole file. Its title is the first heading; SVG pictures stand behind that.

    Raises:
      ModuleNotFoundError: markdown-it-py is missing, which comes with rich.
    """
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise ModuleNotFoundError("HTML is made with markdown-it-py: pip install rich") from None
    heading, _, rest = markdown.partition("\n")
    title = html.escape(heading.lstrip("# "))
    render = MarkdownIt("commonmark", {"html": False}).enable("table").render
    shown = "".join(_picture(x) for x in pictures)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}</style></head>\n<body>\n"
        f"<h1>{title}</h1>\n{shown}{render(rest)}</body></html>\n"
    )


def _picture(path: Path) -> str:
    """As data, each with names of its own: parts of SVG files share names."""
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<div class="plot"><img alt="{html.escape(path.stem)}" '
        f'src="data:image/svg+xml;base64,{data}"></div>\n'
    )
