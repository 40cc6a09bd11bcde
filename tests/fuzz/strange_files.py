"""Things in the place of a file: a pipe, a device, a folder, a link, a file of a terabyte."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

KINDS = ("pipe", "zeros", "null", "folder", "loop", "link", "nowhere", "huge", "missing")


def make(random: Random, file: Path, content: bytes) -> str:
    """Make a random kind at the path `file` and return it. A link leads to a file with content."""
    kind = random.choice(KINDS)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind in ("zeros", "null"):
        file.symlink_to({"zeros": "/dev/zero", "null": "/dev/null"}[kind])
    elif kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "link":
        file.with_name("target of a link").write_bytes(content)
        file.symlink_to("target of a link")
    elif kind == "nowhere":
        file.symlink_to("nowhere")
    elif kind == "huge":
        with open(file, "wb") as opened:
            opened.truncate(2**40)
    return kind
