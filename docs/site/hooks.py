"""A hook of mkdocs that changes links in pages that are also read in the repository."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")
_OWN_FILE = re.compile(r"\[([^\]]+)\]\((?!\.\./|https?:)[\w/]+\.py\)")
_BY_FILE_NAME = re.compile(r"\[(?:docs/)?[\w/]+\.md\]\(([\w/.-]+\.md)(#[\w-]+)?\)")
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Make links out of the docs lead to the repository; without its address, remove them."""
    url = (config.get("repo_url") or "").rstrip("/")
    titles = dict(_titles(config["nav"]))
    titles |= {x.src_uri: _heading(x) for x in files if x.inclusion.name == "NOT_IN_NAV"}

    def outside(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", page.file.src_uri, "..", found[2]))
        if path.partition("#")[0].removeprefix("docs/") in titles:
            return found[0]
        if not (Path(config["config_file_path"]).parent / path.partition("#")[0]).exists():
            raise ValueError(f"{page.file.src_uri}: no such file: {found[2]}")
        return f"[{found[1]}]({url}/blob/main/{path})" if url else found[1]

    def by_title(found: re.Match[str]) -> str:
        title = titles.get(found[1])
        return f"[{title}]({found[1]}{found[2] or ''})" if title else found[0]

    parts = _CODE.split(markdown)
    for i in range(0, len(parts), 2):
        parts[i] = _OWN_FILE.sub(r"\1", _LINK.sub(outside, parts[i]))
        parts[i] = _BY_FILE_NAME.sub(by_title, parts[i])
    return "".join(parts)


def _heading(file: Any) -> str:
    """The title of a page that is not in the navigation."""
    first = file.content_string.partition("\n")[0]
    return first.removeprefix("# ")


def _titles(entries: list[Any]) -> Iterator[tuple[str, str]]:
    """(file, title) of each page of the navigation."""
    for entry in filter(None, entries):
        ((title, inside),) = entry.items()
        if isinstance(inside, list):
            yield from _titles(inside)
        else:
            yield inside, title
