"""Measured calls for which the model of time would choose a slower implementation.

measured.json holds them, by device: a digest of the call, and microseconds by implementation of the
forward pass and of a step, in a program of their own and, if measured, on the device alone. It is
written by tests/scripts/fit_rates.py, together with the rates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources

from attn_dispatch.call.options import Wanted
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.choice.rates import is_same_product
from attn_dispatch.core.tuning.winners import described
from attn_dispatch.devices.device import Device

_NOTHING = Wanted()

Times = Mapping[str, float]
"""Microseconds by implementation."""


def measured_times(
    forward: AttentionSpec, device: Device, *, is_step: bool, is_alone: bool
) -> Times:
    """The measured times of exactly this call; empty if it was not measured, or chosen well.

    Args:
      forward: the forward call.
      device: the device, which must be of the measured kind.
      is_step: whether the backward pass follows.
      is_alone: whether the call is all of its program.
    """
    same = (x for name, x in _cells().items() if is_same_product(name, device.name))
    cells = next(same, None)
    if not cells or (found := cells.get(digest_of(forward))) is None:
        return {}
    name = "step" if is_step else "forward"
    return found.get(name if is_alone else f"{name}_device", {})


def digest_of(forward: AttentionSpec) -> str:
    """A digest of the facts of a forward call that change its time."""
    text = json.dumps(described(forward.returning(_NOTHING)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def _cells() -> Mapping[str, Mapping[str, Mapping[str, Times]]]:
    """By device, digest, and pass: "forward" or "step", with "_device" for the device alone."""
    file = resources.files("attn_dispatch.core.choice") / "measured.json"
    return json.loads(file.read_text())
