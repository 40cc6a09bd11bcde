"""The stubs of the C++ modules say what the modules have: names, parameters, defaults, results."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

import attn_dispatch
from tests.support import aiter_emulated
from tests.support.backend import needs_cudnn
from tests.support.compiled import needs_compiler

STUBS = Path(attn_dispatch.__file__).parent

# What pybind11 says, and what a stub says of the same.
SAME = (
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "SupportsIndex"),
    (r"collections\.abc\.", ""),
    (r"typing_extensions\.CapsuleType", "object"),
    (r"\bdict\b(?!\[)", "dict[str, object]"),
)


def stub(name: str) -> dict[str, str]:
    """Its functions by name: "(parameters) -> result"."""
    tree = ast.parse((STUBS / f"{name}.pyi").read_text())
    return dict(signature(x) for x in tree.body if isinstance(x, ast.FunctionDef))


def signature(function: ast.stmt) -> tuple[str, str]:
    """("plan", "(attributes: dict[str, object]) -> str")"""
    text = ast.unparse(function).removeprefix("def ").removesuffix(":\n    ...")
    name, bracket, rest = text.partition("(")
    return name, bracket + rest


def real(module: ModuleType) -> dict[str, str]:
    """The same of the module, as pybind11 writes it into docstrings."""
    found: dict[str, str] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or isinstance(value, type):
            continue
        said = str(value.__doc__).splitlines()[0]
        for pattern, ours in SAME:
            said = re.sub(pattern, ours, said)
        found.update([signature(ast.parse(f"def {said}: ...").body[0])])
    return found


def known(signatures: dict[str, str]) -> dict[str, str]:
    """With what a stub may know better: the values of a dict."""
    return {x: y.replace("dict[str, int]", "dict[str, object]") for x, y in signatures.items()}


@needs_cudnn
def test_cuda():
    module = importlib.import_module("attn_dispatch._cuda")
    assert known(stub("_cuda")) == known(real(module))
    assert issubclass(module.CudnnError, RuntimeError)
    tree = ast.parse((STUBS / "_cuda.pyi").read_text())
    classes = {x.name for x in tree.body if isinstance(x, ast.ClassDef)}
    assert classes == {x for x, y in vars(module).items() if isinstance(y, type)}


@needs_compiler
def test_rocm():
    aiter_emulated.emulator()
    module = importlib.import_module(aiter_emulated.NAME)
    assert known(stub("_rocm")) == known(real(module))


@pytest.mark.parametrize("name", ["_cuda", "_rocm"])
def test_a_stub_has_the_docstring_of_its_module(name):
    tree = ast.parse((STUBS / f"{name}.pyi").read_text())
    source = STUBS.parents[1] / f"{name[1:]}_backend" / "module.cc"
    if not source.exists():
        pytest.skip("needs the checkout's sources")
    assert f'"{ast.get_docstring(tree)}"' in source.read_text()
