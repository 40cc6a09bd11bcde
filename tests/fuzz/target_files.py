"""Drawn device properties as a file, as text and in the environment."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from functools import cache
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch.cudnn import plan_store
from attn_dispatch.devices.target import default_device, parse
from attn_dispatch.inspection import explain
from tests.fuzz import mutations, strange_files

_Q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

_really_plan = plan_store.plan
_SHARE_PLANNED = 1 / 40
"""The share of draws in which cuDNN plans for the device, which takes a second."""


@cache
def _real() -> list[dict[str, Any]]:
    folder = Path(str(resources.files("attn_dispatch.devices"))) / "targets"
    return [json.loads(x.read_text()) for x in sorted(folder.glob("*.json"))]


def draw(seed: int) -> str:
    """Parse one target. Returns that it was refused, or how it was explained."""
    random = Random(seed)
    facts = random.choice(_real())
    content = mutations.json_text(random, facts)
    plans = random.random() < _SHARE_PLANNED
    plan_store.plan = _really_plan if plans else lambda *_: ("an engine", 0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "device.json")
        if random.random() < 0.15:
            strange_files.make(random, file, content)
        else:
            file.write_bytes(content)
        text = content.decode(errors="replace").replace("\0", "")
        name = random.choice((str(file), text))
        try:
            device = parse(name)
        except ValueError as error:
            message = str(error)
            assert message.startswith("target: ") and len(message) < 1000
            if name == str(file):
                assert name in message
            return "refused"
        return _explained(name, device, facts, plans)


def _explained(name: str, device: Any, facts: dict[str, Any], plans: bool) -> str:
    read = json.loads(device.properties)
    assert device.arch == f"sm{read['deviceVer'] // 10}" and not device.is_present
    assert device.name == read.get("deviceName", "NVIDIA GPU")
    os.environ["ATTN_DISPATCH_TARGET"] = name.replace("\ud800", "")
    try:
        assert "\0" in name or default_device().platform == "cuda"
    finally:
        del os.environ["ATTN_DISPATCH_TARGET"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = explain(_Q, _Q, _Q, target=name)
    # The table breaks long lines.
    assert "".join(device.name.split()) in "".join(str(found).split())
    assert found.chosen_forward is not None
    which = "as it is" if read == facts else "altered"
    return f"{which}, {'planned' if plans else 'taken'}"
