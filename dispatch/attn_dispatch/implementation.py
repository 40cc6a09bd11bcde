"""What a package imports to bring an implementation; see docs/implementations.md.

Attributes:
  FEATURES: what a call may have beyond plain attention, by the names that an implementation's own
    FEATURES says it knows.
  GROUP: the group of entry points in which a package names its implementation.
"""

from attn_dispatch.call.features import FEATURES
from attn_dispatch.call.operands import Operand
from attn_dispatch.call.options import AttentionOptions, Meaning, Promises, Wanted
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.call.static_arguments import ImplementationName, OwnName
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.from_packages import GROUP
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.reason import Reason

__all__ = [
    "FEATURES",
    "GROUP",
    "AttentionOptions",
    "AttentionSpec",
    "Device",
    "ImplementationName",
    "Meaning",
    "Operand",
    "OwnName",
    "Plan",
    "Promises",
    "Reason",
    "Wanted",
]
