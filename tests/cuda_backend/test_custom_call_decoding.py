"""XLA refuses to compile a custom call with wrong attributes, and the message names them.

The handlers are registered for the CPU here, where a call whose attributes are right is refused
too, but later: because cuDNN is not loaded, or has no properties of a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import jax
import pytest

from attn_dispatch import cudnn
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.devices import target
from tests.support.backend import needs_cudnn, needs_no_driver
from tests.support.repository import ROOT

# Where there is a driver, tests/gpu tests this on the device.
pytestmark = [needs_cudnn, needs_no_driver]

CODE = """
import json
import jax, jax.numpy as jnp, numpy as np
import attn_dispatch._cuda as native
from attn_dispatch import cudnn
from tests.support.cudnn_calls import PLAIN

jax.devices()
TYPE = "attn_dispatch_cudnn_call_site"
jax.ffi.register_ffi_type(TYPE, native.ffi_state_type(), platform="cpu")
jax.ffi.register_ffi_target(cudnn.FORWARD_TARGET, native.ffi_handlers(), platform="cpu")
x = jnp.zeros((2, 256, 8, 64), jnp.bfloat16)
call = jax.ffi.ffi_call(
    cudnn.FORWARD_TARGET,
    [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((256,), jnp.uint8)],
)

def compiled(drop=(), **changes):
    attributes = cudnn._ffi_attributes(PLAIN) | changes
    attributes = {name: x for name, x in attributes.items() if name not in drop}
    try:
        jax.jit(lambda x: call(x, x, x, **attributes)).lower(x).compile()
    except jax.errors.JaxRuntimeError as error:
        print(json.dumps(str(error)))
    else:
        print('"compiled"')
"""


def messages_of(calls: str, *arguments: str) -> list[str]:
    """The error message of each call to `compiled`; one new process runs them all."""
    code = "import sys; sys.path.insert(0, sys.argv[1])\n" + CODE + textwrap.dedent(calls)
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT, *arguments],
        capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_wrong_attributes_are_named():
    right, *wrong = messages_of(
        """
        compiled()
        compiled(drop=["scale"])
        compiled(surplus=np.int64(1))
        compiled(drop=["scale", "batch"], scales=np.float32(1))
        compiled(batch=np.float32(2))
        compiled(dtype=np.int64(2), deterministic="yes")
        """
    )
    assert right == ("FAILED_PRECONDITION: attn_dispatch cuDNN (library): cuDNN is not loaded")
    begin = "INVALID_ARGUMENT: attn_dispatch cuDNN (wrong call): attributes of the custom call: "
    assert all(x.startswith(begin) for x in wrong), wrong
    missing, unknown, several, number, kinds = [x.removeprefix(begin) for x in wrong]
    assert (missing, unknown) == ("missing scale", "unknown surplus")
    assert several == "missing batch; missing scale; unknown scales"
    assert number.startswith("batch: ") and "expected S64 but got F32" in number
    assert kinds.startswith("dtype: ") and "; deterministic: " in kinds


def test_the_poison_switch_is_empty_or_0_or_1():
    unset, empty, zero, one, wrong = messages_of(
        """
        import os
        compiled()
        for value in ("", "0", "1", "yes"):
            os.environ["ATTN_DISPATCH_POISON"] = value
            compiled()
        """
    )
    assert unset == empty == zero == one
    assert wrong.endswith("(wrong call): ATTN_DISPATCH_POISON: expected 0 or 1, got 'yes'")


def test_a_call_is_planned_for_the_first_local_device():
    """The stand-in has no device, and the refusal names the device that was asked for."""
    third, default = messages_of(
        """
        native.load_cudnn(sys.argv[2], allow_stand_ins=True)
        native.set_local_devices([3, 5])
        compiled()
        native.set_local_devices([])
        compiled()
        """,
        cudnn_library.find().path,
    )
    assert "no properties of device 3: " in third and "no properties of device 0: " in default


def test_registering_passes_on_the_devices_that_jax_uses(monkeypatch: pytest.MonkeyPatch):
    ordinals = []
    backend = SimpleNamespace(
        ffi_handlers=dict, ffi_state_type=dict, set_local_devices=ordinals.append
    )
    devices = [SimpleNamespace(local_hardware_id=i) for i in (3, 5)]
    monkeypatch.setattr(cudnn, "_backend", lambda: backend)
    monkeypatch.setattr(jax.ffi, "register_ffi_type", lambda *_, **__: None)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
    monkeypatch.setattr(jax, "local_devices", lambda backend: devices)
    register = cudnn.register.__wrapped__
    register()
    monkeypatch.undo()
    assert ordinals == [[3, 5]] and target.local_nvidia_ordinals() == []
