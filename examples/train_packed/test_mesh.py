"""On eight devices losses and gradients are those of one, packed and padded."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

for _package in ("flax", "optax"):
    pytest.importorskip(_package, reason=f"{_package} missing: pip install flax optax")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The output of on_a_mesh.py in a process with eight CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = [
        sys.executable, "-W", "error", "-m", "examples.train_packed.on_a_mesh",
        str(tmp_path_factory.mktemp("checkpoints")),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_loss_and_gradients_are_those_of_one_device(found):
    assert len(found["gaps"]) == 7
    assert max(found["gaps"].values()) < 1e-5, found["gaps"]


def test_weights_are_split(found):
    """An eighth, but for what is whole on each device of the model axis."""
    assert found["shards"] == {
        "q": [2, 32, 16], "k": [2, 32, 8], "o": [2, 16, 32], "down": [2, 24, 32],
    }  # fmt: skip
    # Two kv heads do not divide into four parts.
    assert found["k_of_2x4"] == [2, 32, 16]


def test_a_run_goes_on_on_another_mesh(found):
    assert found["resumed"] == pytest.approx(found["whole"], rel=1e-5)
    assert len(found["whole"]) == 4


def test_sizes_that_do_not_divide_are_an_error(found):
    assert "expected 4 rows to be a multiple of the data axis, got 8" in found["rows"]
    assert "expected heads 4 to be a multiple of the model axis, got 8" in found["heads"]
    tokens = r"expected \d+ tokens in a row to be a multiple of the context axis, got 7"
    assert re.search(tokens, found["tokens"])
