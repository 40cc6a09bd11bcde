"""README.md and docs: snippets run, commands exist, links lead somewhere, messages are real."""

from __future__ import annotations

import ast
import contextlib
import html
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import attn_dispatch
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch_tools import cli
from tests.support.repository import ROOT
from tests.wrong_implementations import WRONG

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NAMES = [str(x.relative_to(ROOT)) for x in PAGES]
# The snippets of this page need frameworks: tests/integrations runs them.
FRAMEWORKS_PAGE = "docs/integrations.md"
SERVING_PAGE = "docs/serving.md"
"""tests/serving runs it."""

# The comments of its print calls are what they print where cuDNN plans.
KERNELS_PAGE = "docs/caches.md"

# The sections of the same page, and arguments that the calls in their examples have.
KINDS_OF_CACHES = {
    "Left padding": ("query_segment_ids", "key_value_segment_ids", "max_segments"),
    "Ring buffers": ("key_value_seq_lengths", "mask_mod"),
    "Sliding caches": ("key_value_segment_ids", "local_window_size"),
    "Prompts in chunks": ("query_seq_lengths", "key_value_seq_lengths", "causal_alignment"),
    "Drafts": ("key_value_seq_lengths", "causal_alignment", "mask_mod"),
    "Models you did not write": ("key_value_segment_ids", "max_segments"),
}

# A snippet with one of these in the line before its fence is not run here.
NEEDS = {
    "<!-- needs a GPU -->": "a GPU",
    "<!-- needs a program of yours -->": "names that the page does not define",
}
_FENCE = re.compile(r"^(?P<before>[^\n]*\n)?```(?P<kind>\w*)\n(?P<code>.*?)^```$", re.M | re.S)


def fences(page: Path, *kinds: str) -> list[tuple[str, str]]:
    """The (line before the block, code) of each fenced block of these kinds."""
    found = _FENCE.finditer(page.read_text("utf-8"))
    return [((x["before"] or "").strip(), x["code"]) for x in found if x["kind"] in kinds]


@pytest.mark.parametrize("name", [x for x in NAMES if x not in (FRAMEWORKS_PAGE, SERVING_PAGE)])
def test_the_snippets_of_a_page_run_in_order(name: str, monkeypatch):
    """The snippets of one page share their names."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    names: dict[str, object] = {"__name__": "snippet"}
    codes = [code for before, code in fences(ROOT / name, "python") if before not in NEEDS]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for code in codes:
            exec(compile(code, f"{name}: {code[:40]!r}", "exec"), names)
    if name == KERNELS_PAGE and cudnn_library.find().is_usable:
        expected = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(codes), re.M)
        assert len(expected) > 10
        assert printed.getvalue().splitlines() == expected


@pytest.mark.parametrize("kind", KINDS_OF_CACHES)
def test_each_kind_of_cache_has_an_example_that_is_compared(kind: str):
    page = (ROOT / KERNELS_PAGE).read_text("utf-8")
    table, _, _ = page.partition("\n## ")
    assert f"](#{kind.lower().replace(' ', '-')}) |" in table
    _, _, section = page.partition(f"\n## {kind}\n")
    section, _, _ = section.partition("\n## ")
    code = "".join(x["code"] for x in _FENCE.finditer(section) if x["kind"] == "python")
    assert "assert_equal(" in code
    for argument in KINDS_OF_CACHES[kind]:
        assert f"{argument}=" in code, argument


def test_at_most_two_snippets_are_marked_as_not_run():
    marks = [before for page in PAGES for before, _ in fences(page, "python") if before in NEEDS]
    assert len(marks) <= 2, marks
    for page in PAGES:
        for before, code in fences(page, "python"):
            assert not before.startswith("<!--") or before in NEEDS, before
            compile(code, str(page), "exec")


def commands(page: Path) -> list[str]:
    """Each command line of a page, in shell blocks, indented blocks and inline code."""
    blocks = [code for _, code in fences(page, "sh", "dockerfile")]
    text = _FENCE.sub("", page.read_text("utf-8"))
    blocks += re.findall(r"^    (?=\S)(.*)$", text, re.M)
    blocks += re.findall(r"`((?:attn-dispatch|make) [a-z][^`\n]*)`", text)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [x.strip() for x in lines if x.strip() and not x.lstrip().startswith("#")]


@pytest.mark.parametrize("name", NAMES)
def test_the_command_lines_of_a_page_are_valid(name: str, capsys):
    targets = re.findall(r"^([a-z-]+)(?: [a-z-]+)?:", (ROOT / "Makefile").read_text(), re.M)
    targets += ["serve"]
    for line in commands(ROOT / name):
        line = re.split(r" [>|] ", line)[0]
        words = shlex.split(line, comments=True)
        words = words[next((i for i, x in enumerate(words) if "=" not in x), 0) :]
        if words[:3] == [".venv/bin/python", "-m", "attn_dispatch"]:
            words = ["attn-dispatch", *words[3:]]
        if words[0].rpartition("/")[2] == "attn-dispatch":
            if words[1] not in cli.names():
                assert words[1] == "COMMAND", line
            elif len(words) > 2 and "…" not in line:
                _check_arguments(words[1:], line, capsys)
        elif words[0] == "make":
            assert words[1] in targets, line
        elif words[0] in ("python", "python3", ".venv/bin/python") and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), line


def _check_arguments(words: list[str], line: str, capsys) -> None:
    try:
        cli.parser().parse_args(words)
    except SystemExit as stop:
        error = capsys.readouterr().err
        if "invalid choice: 'toy'" in error or "invalid choice: 'NAME'" in error:
            return  # stands for an implementation that the reader writes
        # Prose may name an option without its value, or a command without its arguments.
        is_prose = (
            "expected one argument" in error
            or "at least one argument" in error
            or "arguments are required" in error
        )
        assert stop.code == 0 or is_prose, f"{line}: {error}"


@pytest.mark.parametrize("name", NAMES)
def test_the_extras_on_a_page_exist(name: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / name).read_text("utf-8")
    for extras in re.findall(r"install[^\n`]*?['\"]?(?:\.|/src)\[([\w,]+)\]", text):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), extras


@pytest.mark.parametrize("name", NAMES)
def test_the_links_of_a_page_have_files_and_headings(name: str):
    text = _FENCE.sub("", (ROOT / name).read_text("utf-8"))
    for where in re.findall(r"\]\(([^)\s]+)\)", text):
        if where.startswith("http"):
            continue
        path, _, anchor = where.partition("#")
        file = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert file.exists(), where
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file), where


def _anchors(page: Path) -> set[str]:
    text = _FENCE.sub("", page.read_text("utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", x.lower()).strip().replace(" ", "-") for x in headings}


def test_each_message_in_troubleshooting_is_in_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    headings = re.findall(r"^### `(.*)`$", page, re.M)
    assert len(headings) > 15
    pieces = _strings()
    for heading in headings:
        for part in heading.split("…"):
            assert any(part.strip() in x for x in pieces), f"{heading}: {part!r}"


def _strings() -> list[str]:
    """All strings in the code of the packages, with {} for replaced parts."""
    found = []
    for path in Path(attn_dispatch.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (x.value if isinstance(x, ast.Constant) else "{}" for x in node.values)
                found.append("".join(map(str, parts)))
    return found


def test_every_page_is_in_the_navigation_or_evidence_and_the_readme_is_short():
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in PAGES[1:]:
        assert f": {page.name}\n" in config or f"  /{page.name}\n" in config, page.name
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 150


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name == "id" and value:
                self.ids.add(value)


def test_the_site_builds_without_warnings_or_dead_links(tmp_path: Path):
    for module in ("material", "mkdocs", "mkdocstrings_handlers", "ruff"):
        pytest.importorskip(module)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {}
    for file in tmp_path.rglob("*.html"):
        pages[file] = _Links()
        pages[file].feed(file.read_text("utf-8"))
    assert len(pages) > 20
    dead = []
    for file, page in pages.items():
        if file.name == "404.html":
            continue
        for link in page.links:
            if re.match(r"https?:|mailto:|data:|javascript:", link):
                continue
            path, _, anchor = link.partition("#")
            other = (file.parent / path).resolve() if path else file
            if not other.exists():
                dead.append(f"{file.name}: {link}")
            elif anchor and other in pages and anchor not in pages[other].ids | {"__skip"}:
                dead.append(f"{file.name}: {link}")
    assert not dead
    # Signatures have a line for each argument.
    api = html.unescape(re.sub(r"<[^>]+>", "", (tmp_path / "api.html").read_text("utf-8")))
    assert "dot_product_attention(\n    query: ArrayLike,\n    key: ArrayLike,\n" in api
    # The search works without a server and without the network.
    assert (tmp_path / "search/search_index.js").read_text("utf-8").startswith("var __index = {")
    assert "javascripts/iframe-worker.js" in pages[tmp_path / "index.html"].links
    for page in pages.values():
        assert not [x for x in page.links if re.match(r"(https?:)?//.*\.(js|css)$", x)]


def test_hooks_rewrite_links_and_refuse_missing_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    hooks = importlib.import_module("hooks")

    class Page:
        class file:
            src_uri = "x.md"

    config = {"nav": [], "config_file_path": str(ROOT / "mkdocs.yml")}
    text = "[a](../tests/docs/test_docs.py), [`b`](draw_masks.py)\n```\n[c](../gone)\n```\n"
    changed = hooks.on_page_markdown(text, page=Page, config=config, files=[])
    assert changed == "a, `b`\n```\n[c](../gone)\n```\n"
    config["repo_url"] = "https://example.org/x/"
    changed = hooks.on_page_markdown("[a](../README.md#b)", page=Page, config=config, files=[])
    assert changed == "[a](https://example.org/x/blob/main/README.md#b)"
    with pytest.raises(ValueError, match=r"x.md: no such file: ../gone"):
        hooks.on_page_markdown("[a](../gone)", page=Page, config=config, files=[])
    Page.file.src_uri = "in/x.md"
    config["nav"] = [{"Y": "y.md"}]
    text = "[a](../y.md#b), [c](../../README.md)"
    changed = hooks.on_page_markdown(text, page=Page, config=config, files=[])
    assert changed == "[a](../y.md#b), [c](https://example.org/x/blob/main/README.md)"


def test_pages_count_the_wrong_implementations():
    for name in ("docs/design.md", "docs/proof.md"):
        found = re.findall(r"(\d+) wrong implementations", (ROOT / name).read_text("utf-8"))
        assert found and set(found) == {str(len(WRONG))}, name
