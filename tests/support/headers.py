"""The build's script that finds headers, as a module."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.support.repository import ROOT

SCRIPT = ROOT / "cuda_backend" / "find_headers.py"


def find_headers() -> ModuleType:
    """A fresh copy of cuda_backend/find_headers.py, which is no package."""
    spec = importlib.util.spec_from_file_location("find_headers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["find_headers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
