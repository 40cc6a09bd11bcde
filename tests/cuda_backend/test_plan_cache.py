"""The CUDA library: its cache of plans, and its messages for wrong input or a wrong cuDNN."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.devices.target import parse
from tests.support.backend import needs_cudnn
from tests.support.cudnn_calls import cudnn_attributes

pytestmark = needs_cudnn

SM90 = parse("sm90").properties or ""

ATTRIBUTES = cudnn_attributes(batch=1, num_heads=2, num_kv_heads=2, seq_len_q=128, seq_len_kv=128)


@pytest.fixture
def backend() -> Any:
    return cudnn_library.find().backend


def builds_and_hits(backend: Any) -> tuple[int, int]:
    stats = backend.plan_cache_stats()
    return stats["builds"], stats["hits"]


def test_threads_that_plan_at_once_share_one_build(backend):
    attributes = ATTRIBUTES | {"seq_len_q": 136}
    builds, hits = builds_and_hits(backend)
    start = threading.Barrier(8)
    plans = []

    def ask():
        start.wait()
        plans.append(backend.plan(attributes, SM90))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(plans) == 8 and len(set(plans)) == 1
    assert builds_and_hits(backend) == (builds + 1, hits + 7)


def test_the_key_of_a_plan_has_everything_it_depends_on(backend):
    builds, _ = builds_and_hits(backend)
    attributes = ATTRIBUTES | {"seq_len_q": 152}
    backend.plan(attributes, SM90)
    backend.plan(attributes | {"scale": 0.25}, SM90)
    backend.plan(attributes, parse("sm80").properties)
    backend.plan(attributes, parse("sm120").properties)
    assert builds_and_hits(backend)[0] == builds + 4
    # The same kind of device in another slot, with its JSON's keys in another order.
    other = json.dumps(json.loads(SM90) | {"pciDeviceId": 99, "cudaDeviceId": 3}, sort_keys=True)
    backend.plan(attributes, other)
    assert builds_and_hits(backend)[0] == builds + 4


def test_refusals_are_cached(backend):
    attributes = ATTRIBUTES | {"backward": True, "head_dim": 256, "head_dim_v": 256, "batch": 3}
    refusals = []
    builds, hits = builds_and_hits(backend)
    for _ in range(3):
        with pytest.raises(backend.CudnnError, match="hidden_dim") as refusal:
            backend.plan(attributes, parse("sm80").properties)
        refusals.append((refusal.value.code, str(refusal.value)))
    assert refusals[0][0] == "unsupported" and len(set(refusals)) == 1
    assert builds_and_hits(backend) == (builds + 1, hits + 2)


def test_cache_is_bounded(backend):
    """The cache drops its oldest entry when it is full (here of refusals, which are fast)."""
    capacity = backend.plan_cache_stats()["capacity"]
    assert 16 <= capacity <= 4096

    def refuse(batch: int) -> None:
        # A launch grid that is too large is refused before cuDNN plans.
        with pytest.raises(backend.CudnnError, match="65535"):
            backend.plan(ATTRIBUTES | {"batch": batch}, SM90)

    for batch in range(70_000, 70_000 + capacity + 5):
        refuse(batch)
    assert backend.plan_cache_stats()["size"] == capacity
    builds, _ = builds_and_hits(backend)
    refuse(70_000 + capacity + 4)
    assert builds_and_hits(backend)[0] == builds
    refuse(70_000)
    assert builds_and_hits(backend)[0] == builds + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, 'dtype: expected float16 or bfloat16, got "float32"'),
        ({"num_heads": 3}, "num_heads: expected a multiple of num_kv_heads=2, got 3"),
        ({"batch": -1}, "batch: expected 1 to 2147483647, got -1"),
    ],
    ids=str,
)
def test_wrong_attributes_are_refused(backend, change, message):
    with pytest.raises(backend.CudnnError, match=message) as error:
        backend.plan(ATTRIBUTES | change, SM90)
    assert error.value.code == "wrong call"


def test_missing_unknown_and_mistyped_attributes_are_named(backend):
    incomplete = {name: x for name, x in ATTRIBUTES.items() if name != "scale"}
    for attributes, message in (
        (incomplete | {"window": 3}, "missing scale; unknown 'window'"),
        (ATTRIBUTES | {"batch": "two"}, "batch: expected an integer of 64 bits, got 'two'"),
    ):
        with pytest.raises(backend.CudnnError) as error:
            backend.plan(attributes, SM90)
        assert str(error.value) == message and error.value.code == "wrong call"


DEEP = '{"deviceVer": 900, "x": ' + 100_000 * "[" + 100_000 * "]" + "}"
LONG = '{"deviceVer": 900, "x": "' + 2**20 * "x" + '"}'


@pytest.mark.parametrize(
    "properties", ["", "{", "[]", "{}", "3", '{"deviceName": "H200"}', DEEP, LONG], ids=range(8)
)
def test_wrong_device_properties_are_refused(backend, properties):
    with pytest.raises(backend.CudnnError, match="JSON object with deviceVer") as error:
        backend.plan(ATTRIBUTES, properties)
    assert error.value.code == "wrong call"


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"deviceVer": 900}, "multiProcessorCount"),
        ({"deviceVer": "900", "multiProcessorCount": 132}, "deviceVer"),
        ({"deviceVer": 2**40, "multiProcessorCount": 132}, "deviceVer"),
        ({"deviceVer": 900, "multiProcessorCount": -1}, "multiProcessorCount"),
    ],
)
def test_incomplete_device_properties_are_refused(backend, properties, name):
    for function in (backend.plan, backend.engines):
        with pytest.raises(backend.CudnnError, match=f"{name}: expected a positive") as error:
            function(ATTRIBUTES, json.dumps(properties))
        assert error.value.code == "wrong call"


def test_the_first_library_loaded_is_final(backend):
    assert backend.load_cudnn("/nowhere/libcudnn.so.9") == backend.cudnn_version() > 0


_SCRIPT = """
import jax, jax.numpy as jnp, attn_dispatch
q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
explanation = attn_dispatch.explain(q, q, q, target="sm90")
print(explanation.forward[0].reasons, explanation.chosen_forward)
x = jnp.ones((1, 4, 1, 8))
print(attn_dispatch.dot_product_attention(x, x, x).shape)
"""


@pytest.mark.parametrize("kind", ["missing", "no library", "not cuDNN"])
def test_a_wrong_library_is_a_reason_and_no_crash(tmp_path, kind):
    """A new process tries each, since the first cuDNN that loads is final."""
    path, reason = tmp_path / "libcudnn.so.9", "cuDNN could not be loaded"
    if kind == "no library":
        path.write_text("text")
    elif kind == "not cuDNN":
        path.symlink_to(importlib.import_module("attn_dispatch._cuda").__file__ or "")
        reason = "has no cudnnGetVersion: not a cuDNN"
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True,
        env=os.environ | {"ATTN_DISPATCH_CUDNN": str(path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    explanation, result = done.stdout.splitlines()
    assert reason in explanation and str(path) in explanation and explanation.endswith("unknown")
    assert result == "(1, 4, 1, 8)"
