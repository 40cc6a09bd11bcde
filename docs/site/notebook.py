"""A hook of mkdocs that makes docs/notebook.ipynb a page of the site, with its outputs."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

SOURCE = "notebook.ipynb"
_PAGE = "notebook.md"


def on_files(files: Any, config: Any) -> Any:
    """Add the page and its pictures, which are only in the notebook."""
    markdown, pictures = page(Path(config["docs_dir"], SOURCE).read_text("utf-8"))
    files.append(File.generated(config, _PAGE, content=markdown))
    for name, content in pictures.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Make links to the notebook lead to its page on the site."""
    return markdown.replace(f"]({SOURCE})", f"]({_PAGE})")


def page(source: str) -> tuple[str, dict[str, bytes]]:
    """The page as Markdown, and its pictures by name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(source)["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append("```text\n" + "".join(output["text"]) + "```")
            elif picture := output.get("data", {}).get("image/png"):
                name = f"notebook_{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(picture))
                parts.append(f"![{_alternative(text)}]({name})")
            else:
                raise ValueError(f"{SOURCE}: no way to show {output['output_type']}")
    return "\n\n".join(parts) + "\n", pictures


def _alternative(code: str) -> str:
    """The alternative text of a picture, from the labels of its axes."""
    found = re.search(r'xlabel="([^"]+)", ylabel="([^"]+)"', code)
    return f"{found[2]} against {found[1]}" if found else "figure"
