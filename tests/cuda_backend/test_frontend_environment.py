"""cudnn-frontend's switch for deterministic gradients is set for cudnn-frontend alone.

The process's environment does not change.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from attn_dispatch.cudnn import library as cudnn_library
from tests.support.backend import needs_cudnn
from tests.support.repository import ROOT

pytestmark = [
    needs_cudnn,
    pytest.mark.skipif(cudnn_library.find().version < 92500, reason="needs cuDNN 9.25 or later"),
]

SWITCH = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"

# cuDNN is loaded in this process, as it is where there is a driver.
CODE = """
import ctypes, os
import attn_dispatch._cuda as native
from attn_dispatch.devices.target import parse
from tests.support.cudnn_calls import cudnn_attributes

def environment():
    seen = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    entries = []
    while seen[len(entries)] is not None:
        entries.append(seen[len(entries)])
    return sorted(entries), dict(os.environ)

before = environment()
native.load_cudnn(sys.argv[2], allow_stand_ins=True)
call = cudnn_attributes(backward=True, deterministic=True, seq_len_q=8192, seq_len_kv=8192)
print(native.plan(call, parse("sm90").properties)[1])
assert environment() == before, set(environment()[0]) ^ set(before[0])
"""

QUADRATIC = 2 * 8 * 8192 * 8192 * 2
"""The bytes of all scores of the call, which cuDNN stores unless the switch limits them."""


def workspace_bytes(**environment: str) -> int:
    code = "import sys; sys.path.insert(0, sys.argv[1])\n" + textwrap.dedent(CODE)
    unset = {name: x for name, x in os.environ.items() if name != SWITCH}
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT, cudnn_library.find().path],
        capture_output=True, text=True, env=unset | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_long_deterministic_calls_use_the_switch_and_restore_the_environment():
    assert workspace_bytes() < QUADRATIC / 8


def test_the_users_setting_takes_precedence():
    assert workspace_bytes(**{SWITCH: "-1"}) >= QUADRATIC
