"""The state of a run in an .npz file, which is written completely or not at all.

The file does not depend on the mesh, so that a run may continue on another one.
"""

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

KEPT = 2
"""The number of files that are kept; older ones are removed."""

_FACTS = "facts"
_BROKEN = (EOFError, IndexError, KeyError, TypeError, ValueError)
"""Errors from reading a file that is no checkpoint; zipfile and zlib have others."""


def save(folder: Path, step: int, state: Any, facts: dict[str, Any]) -> Path:
    """Write the state after `step` steps, with `facts` as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {name: np.asarray(x) for name, x in _named(state).items()}
    path = folder / f"step_{step:08}.npz"
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, **{_FACTS: np.array(json.dumps(facts))}, **arrays)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)  # atomic, so that nobody reads half a file
    for old in _all(folder)[:-KEPT]:
        old.unlink()
    return path


def latest(folder: Path) -> Path | None:
    """The file of the latest step; None if there is none."""
    return next(reversed(_all(folder)), None)


def read_facts(path: Path) -> dict[str, Any]:
    """The facts that were saved with a state.

    Raises:
      ValueError: the file is no checkpoint, or is broken.
    """
    return json.loads(str(_read(path, _FACTS)[_FACTS]))


def restore(path: Path, like: Any) -> Any:
    """The state in a file, with each array sharded as in `like`.

    Raises:
      ValueError: the file is broken, or its arrays differ from `like` in name, shape or dtype.
    """
    wanted = _named(like)
    arrays = _read(path)
    names = {*arrays} - {_FACTS}
    if names != {*wanted}:
        raise ValueError(
            f"{path}: expected the arrays of this run; these differ: {names ^ {*wanted}}"
        )
    found = []
    for name, x in wanted.items():
        array = arrays[name]
        if array.shape != x.shape or array.dtype != x.dtype:
            raise ValueError(
                f"{path}: expected {name} {x.dtype}{x.shape}, got {array.dtype}{array.shape}"
            )
        found.append(jax.device_put(array, x.sharding))
    return jax.tree.unflatten(jax.tree.structure(like), found)


def _read(path: Path, only: str | None = None) -> dict[str, np.ndarray]:
    """The arrays of a file by name, or only one of them."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in ([only] if only else file.files)}
    except (*_BROKEN, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path}: expected a checkpoint, got another file or a broken one; if you remove it, "
            "training resumes from the checkpoint before, if there is one"
        ) from error


def _named(state: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step_*.npz"))
