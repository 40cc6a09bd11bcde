"""While the forward pass of a call is planned, its backward pass is planned beside it.

Vendor libraries plan without Python's lock, and take some fifty milliseconds for each direction.
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

    Whoever lowers it then waits for that plan, or finds it. What goes wrong here, goes wrong there
    as well, where it is said.
    """
    backward = spec.expected_backward()
    # Without a GPU nobody waits for a result, and one process plans one call after the other.
    if backward is None or not device.is_present or device.platform != "cuda":
        return
    surroundings = settings.current()

    def run() -> None:
        with contextlib.suppress(Exception), settings.restored(surroundings):
            select.plan(backward, device)

    with contextlib.suppress(RuntimeError):  # no more threads: it is planned when it is lowered
        threading.Thread(target=run, name="attn_dispatch planning").start()
