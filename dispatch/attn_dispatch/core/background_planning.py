"""Planning the backward pass in another thread while the forward pass is planned.

Vendor libraries release Python's lock while they plan, which takes about 50 ms for each direction.
"""

from __future__ import annotations

import contextlib
import threading

from attn_dispatch import settings
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.devices.device import Device


def plan_backward(spec: AttentionSpec, device: Device) -> None:
    """Begin to plan the backward pass of a forward call that will have one, in another thread.

    The lowering of the backward pass waits for that plan, or finds it. Errors are dropped here: the
    lowering meets the same error and reports it.
    """
    backward = spec.expected_backward()
    # Without a GPU no run waits for the plan, and a single process plans one call at a time.
    if backward is None or not device.is_present or device.platform != "cuda":
        return
    surroundings = settings.current()

    def run() -> None:
        with contextlib.suppress(Exception), settings.restored(surroundings):
            select.plan(backward, device)

    with contextlib.suppress(RuntimeError):  # no thread is left: lowering plans it
        threading.Thread(target=run, name="attn_dispatch planning").start()
