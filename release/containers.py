"""Builds the Dockerfiles of docs/install.md as they are written, with buildah.

usage: python release/containers.py [--rootfs FOLDER] [--only TEXT]

Needs root. If no registry can be reached, `--rootfs` names a folder that is used in place of the
base image, with Debian and a Python on PATH. The measurements go into
release/results/containers.json.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import install_lines
from plugins import BUILD, REPOSITORY
from record import RESULTS, commit, read

KEPT = RESULTS / "containers.json"
_PAGE = REPOSITORY / "docs" / "install.md"
_BASE = re.compile(r"^FROM (\S+)", re.M)


def dockerfiles() -> list[str]:
    return re.findall(r"^```dockerfile\n(.*?)^```$", _PAGE.read_text("utf-8"), re.M | re.S)


def name_of(dockerfile: str) -> str:
    """The name of a Dockerfile, which is its install line."""
    (line,) = re.findall(r"^RUN (.*pip install .*)$", dockerfile, re.M)
    return line


def _buildah(*command: str | Path) -> str:
    done = subprocess.run(
        ["buildah", "--storage-driver", "vfs", "--root", BUILD / "containers", *map(str, command)],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise SystemExit(f"buildah {command[0]}: " + "\n".join(output[-12:]))
    return done.stdout.strip()


def _stand_in(rootfs: Path, base: str) -> None:
    """Make an image of a folder, with the name of the base image."""
    container = _buildah("from", "scratch")
    _buildah("add", container, rootfs, "/")
    path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    _buildah("config", "--env", path, container)
    _buildah("commit", "--rm", container, base)


def built(dockerfile: str, rootfs: Path | None) -> dict[str, Any]:
    """Build a Dockerfile, run `attn-dispatch info` in the image, and return the measurements."""
    (base,) = _BASE.findall(dockerfile)
    if rootfs:
        _stand_in(rootfs, base)
    context = install_lines.checkout()
    path = BUILD / "Dockerfile"
    path.write_text(dockerfile)
    start = time.monotonic()
    _buildah("build", "--isolation", "chroot", "--pull-never" if rootfs else "--pull", "--tag",
             "built", "--file", path, context)  # fmt: skip
    seconds = round(time.monotonic() - start, 1)
    container = _buildah("from", "--pull-never", "built")
    info = _buildah("run", "--isolation", "chroot", container, "--", "attn-dispatch", "info")
    size = json.loads(_buildah("images", "--json", "built"))[0]["size"]
    _buildah("rm", container)
    _buildah("rmi", "built")
    return {
        "base": f"{base}, for which {_release(rootfs)} stood in" if rootfs else base,
        "seconds": seconds,
        "size": size,
        "info": info,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def _release(rootfs: Path) -> str:
    facts = (rootfs / "etc" / "os-release").read_text()
    (name,) = re.findall(r'^PRETTY_NAME="(.*)"$', facts, re.M)
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rootfs", type=Path)
    parser.add_argument("--only", default="", help="build those whose install line contains this")
    args = parser.parse_args()
    kept = read(KEPT) if KEPT.exists() else {}
    for dockerfile in dockerfiles():
        name = name_of(dockerfile)
        if args.only in name:
            kept[name] = built(dockerfile, args.rootfs)
            print(f"{name}: {kept[name]['seconds']} s, {kept[name]['size']}\n{kept[name]['info']}")
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
