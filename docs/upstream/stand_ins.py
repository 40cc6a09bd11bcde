"""Stand-ins for packages that a trainer imports, but that its attention never calls.

A pytest plugin too:

    ATTN_STAND_INS=tensorflow,seqio PYTHONPATH=docs/upstream python -m pytest -p stand_ins …

Whatever is taken from a stand-in is an empty class: it may be subclassed, named in an annotation
and asked for in isinstance. A test that calls one fails, so none passes by it.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types


class _Empty(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(f"{cls.__name__} is a stand-in: its package is not installed")


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def install(packages):
    # Last on the list, so that an installed package takes precedence.
    sys.meta_path.append(_Finder(frozenset(packages)))


if names := os.environ.get("ATTN_STAND_INS"):
    install(names.split(","))
