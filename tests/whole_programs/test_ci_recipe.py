"""The job of a CI in docs/programs.md passes, and fails if one layer of its example changes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.backend import needs_cudnn
from tests.support.repository import ROOT

PAGE = (ROOT / "docs/programs.md").read_text("utf-8")
(COMMAND,) = re.findall(r"^attn-dispatch (explain-program examples\..*)$", PAGE, re.M)
SHOWN = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()
MODEL = "examples/finetune/model.py"
ALL_LAYERS = 'x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params["layers"])'
LAST_LAYER_IN_FLOAT32 = """\
most, last = ({k: w[part] for k, w in params["layers"].items()} for part in (slice(-1), -1))
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, most)
    x, _ = layer(x.astype(jnp.float32), last)
"""

pytestmark = needs_cudnn


def job_in(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attn_dispatch", *shlex.split(COMMAND)]
    environment = os.environ | {"COLUMNS": "100"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def example(tmp_path: Path) -> Path:
    pytest.importorskip("optax")
    pytest.importorskip("rich")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def test_the_job_passes_and_lists_all_layers(example: Path):
    done = job_in(example)
    assert done.returncode == 0, done.stderr
    assert "runs      forward 30; backward 30" in done.stdout


def test_the_job_fails_if_one_layer_is_in_float32(example: Path):
    text = (example / MODEL).read_text("utf-8")
    assert text.count(ALL_LAYERS) == 1
    (example / MODEL).write_text(text.replace(ALL_LAYERS, LAST_LAYER_IN_FLOAT32), "utf-8")
    done = job_in(example)
    assert done.returncode == 1
    assert SHOWN[0].startswith(f"line      {MODEL}:")
    for line in SHOWN:
        assert line == "…" or line in done.stderr, line
    assert "query bfloat16" not in done.stderr  # the layers that run on a kernel
