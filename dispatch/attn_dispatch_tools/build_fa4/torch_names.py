"""A stand-in for PyTorch with which ffpa-attn's kernels are imported and compiled.

Part of export_wide_kernels.py. The kernels' files name PyTorch's types, for the code that calls
them from PyTorch, and use nothing of it.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types

_MODULES = (
    "torch",
    "torch._guards",
    "torch._subclasses",
    "torch._subclasses.fake_tensor",
    "torch.library",
    "torch.nn",
    "torch.nn.functional",
)

_VERSION = "2.10.0"
"""The oldest that ffpa-attn 0.2.4 takes."""


class _Names(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


def install() -> None:
    """Make the stand-in what `import torch` finds."""
    for name in _MODULES:
        module = _Names(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__dict__["__version__"] = _VERSION
        sys.modules[name] = module
