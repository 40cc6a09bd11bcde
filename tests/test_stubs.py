"""The stubs of the C++ modules match them in names, parameters, defaults and results."""

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

# How pybind11 spells a type, and how a stub spells it.
SPELLINGS = (
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "SupportsIndex"),
    (r"collections\.abc\.", ""),
    (r"typing_extensions\.CapsuleType", "object"),
    (r"\bdict\b(?!\[)", "dict[str, object]"),
)


def stub_signatures(name: str) -> dict[str, str]:
    """The functions of a stub, by name: "(parameters) -> result"."""
    tree = ast.parse((STUBS / f"{name}.pyi").read_text())
    return dict(signature(x) for x in tree.body if isinstance(x, ast.FunctionDef))


def signature(function: ast.stmt) -> tuple[str, str]:
    """("plan", "(attributes: dict[str, object]) -> str")"""
    text = ast.unparse(function).removeprefix("def ").removesuffix(":\n    ...")
    name, bracket, rest = text.partition("(")
    return name, bracket + rest


def module_signatures(module: ModuleType) -> dict[str, str]:
    """The functions of a module, by name, as pybind11 writes them into docstrings."""
    found: dict[str, str] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or isinstance(value, type):
            continue
        text = str(value.__doc__).splitlines()[0]
        for pattern, ours in SPELLINGS:
            text = re.sub(pattern, ours, text)
        found.update([signature(ast.parse(f"def {text}: ...").body[0])])
    return found


def with_any_values(signatures: dict[str, str]) -> dict[str, str]:
    """The signatures without types of a dict's values, which a stub may state more precisely."""
    return {
        x: re.sub(r"dict\[str, (int|Attribute)\]|\bFa4Facts\b", "dict[str, object]", y)
        for x, y in signatures.items()
    }


@needs_cudnn
def test_the_stub_of_cuda_matches_the_module():
    module = importlib.import_module("attn_dispatch._cuda")
    assert with_any_values(stub_signatures("_cuda")) == with_any_values(module_signatures(module))
    assert issubclass(module.CudnnError, RuntimeError)
    tree = ast.parse((STUBS / "_cuda.pyi").read_text())
    classes = {x.name for x in tree.body if isinstance(x, ast.ClassDef) and x.name != "Fa4Facts"}
    assert classes == {x for x, y in vars(module).items() if isinstance(y, type)}


@needs_compiler
def test_the_stub_of_rocm_matches_the_module():
    aiter_emulated.emulator()
    module = importlib.import_module(aiter_emulated.NAME)
    assert with_any_values(stub_signatures("_rocm")) == with_any_values(module_signatures(module))


@pytest.mark.parametrize("name", ["_cuda", "_rocm"])
def test_a_stub_has_the_docstring_of_its_module(name):
    tree = ast.parse((STUBS / f"{name}.pyi").read_text())
    source = STUBS.parents[1] / f"{name[1:]}_backend" / "module.cc"
    if not source.exists():
        pytest.skip("needs the checkout's sources")
    assert f'"{ast.get_docstring(tree)}"' in source.read_text()
