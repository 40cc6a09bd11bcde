"""A report as a single HTML file, which holds its text and its plots."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

_STYLE = """\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
table { border-spacing: 0; display: block; overflow-x: auto; margin: 1rem 0; }
th, td { border-bottom: 1px solid #8884; padding: .25rem .7rem; }
th { text-align: left; }
td:first-child, th:first-child { background: Canvas; left: 0; position: sticky; }
td:first-child { white-space: nowrap; }
thead:not(:has(th:not(:empty))) { display: none; }
thead:not(:has(th:not(:empty))) + tbody td + td { overflow-wrap: anywhere; }
h1, h2, h3, li, pre { overflow-wrap: anywhere; }
h1 { font-size: clamp(1.3rem, 5vw, 2rem); line-height: 1.2; }
pre { background: #8881; overflow-x: auto; padding: .7rem; }
.plot { margin: 1rem 0; overflow-x: auto; }
img { background: #fff; display: block; max-width: 100%; min-width: 38rem; }
@media (max-width: 40rem) {
  body { font-size: 14px; margin: 1rem auto; }
  table { font-size: 13px; }
  th, td { padding: .2rem .3rem; }
}
"""


NO_MATPLOTLIB = "plots are drawn with matplotlib: pip install matplotlib, or the extra [bench]"


def page(markdown: str, pictures: Sequence[Path] = ()) -> str:
    """The HTML file of a report.

    Its title is the first heading of the Markdown. SVG pictures follow the first paragraph, which
    summarizes the report.

    Raises:
      ModuleNotFoundError: markdown-it-py is missing, which comes with rich.
    """
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise ModuleNotFoundError("HTML is made with markdown-it-py: pip install rich") from None
    heading, _, rest = markdown.partition("\n")
    summary, _, rest = rest.strip("\n").partition("\n\n")
    title = html.escape(heading.lstrip("# "))
    render = MarkdownIt("commonmark", {"html": False}).enable("table").render
    shown = "".join(_picture(x) for x in pictures)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}</style></head>\n<body>\n"
        f"<h1>{title}</h1>\n{render(summary)}{shown}{render(rest)}</body></html>\n"
    )


def _picture(path: Path) -> str:
    """The HTML of a picture, embedded as data. Inline, SVG files would share the names of parts."""
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<div class="plot"><img alt="{html.escape(path.stem)}" '
        f'src="data:image/svg+xml;base64,{data}"></div>\n'
    )
