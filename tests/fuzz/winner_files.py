"""Drawn files of winners, which are read for a call and then written to."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch.core import select
from attn_dispatch.core.tuning import winners
from attn_dispatch.core.tuning.winners import Winner
from attn_dispatch.devices.target import CPU
from attn_dispatch.inspection import explain, spec_of
from tests.fuzz import mutations, strange_files

_Q = jax.ShapeDtypeStruct((2, 48, 4, 16), jnp.float32)
_SPEC = spec_of(query=_Q, key=_Q, value=_Q, is_causal=True)
_WINNER = Winner(
    call=winners.described(_SPEC), device=CPU.name, versions=select.versions(CPU),
    implementation="xla", engine="", date="2026-11-26", untuned="xla",
    microseconds={"xla": 10.5, "other 3 K=1": 11.0},
)  # fmt: skip
_OTHER = replace(_WINNER, device="NVIDIA H200", engine="6 KERNEL_CFG=2")
_FILE = {"format": 1, "winners": [asdict(_OTHER), asdict(_WINNER)]}


def draw(seed: int) -> str:
    """Read and write one file. Returns whether a winner was found, and another one written."""
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "winners.json")
        os.environ[winners.FILE] = str(file)
        winners._not_kept.clear()
        content = mutations.json_text(random, _FILE)
        if random.random() < 0.1:
            strange_files.make(random, file, content)
        else:
            file.write_bytes(content)
        if random.random() < 0.05:
            strange_files.make(random, file.with_name(".winners.json.lock"), b"")
        return f"{_found(file)}, {_kept(file)}"


def _found(file: Path) -> str:
    found = winners.find(_SPEC, CPU, select.versions)
    assert found == _expected(file)
    if found is None:
        return "not found"
    text = str(explain(_Q, _Q, _Q, is_causal=True, target="cpu"))
    assert text.isprintable() or "\x1b" not in text
    str(found)
    return "found"


def _expected(file: Path) -> Winner | None:
    """The last winner of the call, if all winners of a regular file are well formed."""
    listed = _listed(file)
    same = [x for x in listed or () if winners._key(x["call"], x["device"], x["versions"]) ==
            _WINNER.key]  # fmt: skip
    return Winner(**same[-1]) if same else None


def _listed(file: Path) -> list[dict[str, Any]] | None:
    if not file.is_file() or file.stat().st_size > 2**25:
        return None
    try:
        content = json.loads(file.read_bytes().decode(), object_pairs_hook=_without_doubles)
        listed = content["winners"]
        return listed if content["format"] == 1 and _all_well_formed(listed) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name twice in one object")
    return dict(pairs)


def _all_well_formed(listed: Any) -> bool:
    texts = {"device", "implementation", "engine", "date", "untuned"}
    names = texts | {"call", "versions", "microseconds"}
    for x in listed:
        if not isinstance(x, dict) or x.keys() != names:
            return False
        if not all(isinstance(x[y], str if y in texts else dict) for y in names):
            return False
        times = x["microseconds"]
        if not times or not all(x[y].isprintable() for y in texts):
            return False
        if not all(y.isprintable() for y in times):
            return False
        if not all(type(y) in (int, float) and 0 <= y < 1e12 for y in times.values()):
            return False
    return True


def _kept(file: Path) -> str:
    before = _listed(file)
    content = file.read_bytes() if file.is_file() and file.stat().st_size < 2**25 else None
    new = replace(_OTHER, device="new")
    try:
        winners.keep(new)
    except OSError as error:
        assert str(error) and "\n" not in str(error)
        assert content is None or file.read_bytes() == content, "the file must not change"
        return "not kept"
    after = _listed(file)
    assert after is not None and asdict(new) in after
    assert all(x in after for x in _last_of_each(before or []))
    return "kept"


def _last_of_each(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The winners without those that a later entry of the same call replaces."""
    return list({winners._key(x["call"], x["device"], x["versions"]): x for x in listed}.values())
