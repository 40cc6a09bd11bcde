"""A folder with some of the libraries of which cuDNN consists."""

from __future__ import annotations

from pathlib import Path


def part_of_cudnn(folder: Path, real: str, missing: tuple[str, ...] = ()) -> Path:
    """Link all libraries of a cuDNN but the missing ones in `folder`; the path of its main one."""
    folder.mkdir()
    for file in Path(real).parent.glob("libcudnn*.so.9"):
        if not any(file.name == f"libcudnn_{x}.so.9" for x in missing):
            (folder / file.name).symlink_to(file)
    return folder / "libcudnn.so.9"
