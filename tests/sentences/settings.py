"""Settings: `with` blocks, environment variables and names of targets"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import numpy as np

import attn_dispatch
from attn_dispatch import explain, settings
from attn_dispatch.devices.target import default_device

X = np.zeros((1, 8, 2, 8), np.float32)


def variable(name: str, value: str) -> Any:
    """The settings, or the target, with this environment variable."""
    with mock.patch.dict(os.environ, {f"ATTN_DISPATCH_{name}": value}):
        settings.current()
        return default_device()


ROWS = """
# blocks
attn_dispatch.fallback("raise")
attn_dispatch.sharded_dropout("other")
attn_dispatch.sharded_dropout("sane")
attn_dispatch.rewrites("no")
attn_dispatch.finite_padding(1)
attn_dispatch.finite_padding("yes")
attn_dispatch.aiter_asm(0)
attn_dispatch.context_parallel("heads+ring")
attn_dispatch.tuning(0)
attn_dispatch.tuning(-1)
attn_dispatch.tuning(True)
attn_dispatch.tuning("3")
attn_dispatch.tuning(None)
attn_dispatch.tuning(float("nan"))
attn_dispatch.tuning(float("inf"))
attn_dispatch.scratch_limit("2 apples")
attn_dispatch.scratch_limit("-1GB")
attn_dispatch.scratch_limit("0")
attn_dispatch.scratch_limit("0.4")
attn_dispatch.scratch_limit("101%")
attn_dispatch.scratch_limit("0%")
attn_dispatch.scratch_limit("1e3")
attn_dispatch.scratch_limit("2iB")
attn_dispatch.scratch_limit("2G\\u0131B")
attn_dispatch.scratch_limit("9" * 400)
attn_dispatch.scratch_limit("9" * 400 + "GB")
attn_dispatch.scratch_limit(0)
attn_dispatch.scratch_limit(-1)
attn_dispatch.scratch_limit(0.5)
attn_dispatch.scratch_limit(True)
attn_dispatch.scratch_limit(np.ones(2))

# environment variables
variable("CHECK", "yes")
variable("FINITE_PADDING", "yes")
variable("TRUST_FILES", "yes")
variable("POISON", "perhaps")
variable("FALLBACK", "raise")
variable("TUNING", "nan")
variable("TUNING", "-1")
variable("TUNING", "True")
variable("SCRATCH_LIMIT", "2 apples")
variable("SCRATCH_LIMIT", "-1GB")
variable("SCRATCH_LIMIT", "0.4")
variable("SCRATCH_LIMIT", "101%")
variable("SCRATCH_LIMIT", "1e3")
variable("SCRATCH_LIMIT", "2iB")
variable("SCRATCH_LIMIT", "2G\\u0131B")
variable("SCRATCH_LIMIT", "9" * 400 + "GB")
variable("TARGET", "h1000")

# targets that are similar to one
attn_dispatch.target("h1000")
attn_dispatch.target("H10")
attn_dispatch.target("sm91")
attn_dispatch.target("rtx 5080")
attn_dispatch.target("mi355")
attn_dispatch.target("gfx943")
attn_dispatch.target("90")

# targets that are not
attn_dispatch.target("hopper")
attn_dispatch.target("quantum")
attn_dispatch.target("9")
attn_dispatch.target("h210")
attn_dispatch.target("")
attn_dispatch.target("{")
attn_dispatch.target("no.json")
attn_dispatch.target('{"deviceName": "B300"}')
attn_dispatch.target('{"deviceVer": "new"}')
attn_dispatch.target('{"deviceVer": 900.5}')
attn_dispatch.target('{"deviceVer": true}')
attn_dispatch.target('{"deviceVer": 9}')
attn_dispatch.target("[900]")
explain(X, X, X, target="[900]")
attn_dispatch.target("sm80", "gfx942", "sm90")
attn_dispatch.target("h100", "h200")

# versions of AITER that nothing can be planned for
attn_dispatch.target("h100:aiter0.1.20")
attn_dispatch.target("mi300x:aiter0.1." + "9" * 5000)
attn_dispatch.target("mi300x:aiter0.1.2\\N{ARABIC-INDIC DIGIT ZERO}")
attn_dispatch.target("mi300x:aiter0.1.14")
attn_dispatch.target("mi300x:aiterx")
attn_dispatch.target("x:aiter0.1.20")
attn_dispatch.target("mi300x:aiter0.1.20xyz")
attn_dispatch.target("mi300x:aiter0.1.20.")
attn_dispatch.target("mi300x:aiter0.1.070")
attn_dispatch.target("mi300x:aiter0.1.7.post9")
attn_dispatch.target("mi300x:aiter0.2")
attn_dispatch.target("mi300x:aiter0.1.15:aiter0.1.7")
"""
