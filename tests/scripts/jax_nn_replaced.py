"""A pytest plugin for JAX's own tests: our call stands where `jax.nn.dot_product_attention` did.

With `--jax-nn=replaced` every call is ours. JAX's tests compute their references by the same
function with `implementation=None`, so that compares ours with ours: it shows that our call takes
and returns the same things. With `--jax-nn=reference` those calls stay jax.nn's, which shows that
the values agree.

A test that passes without a call of ours would prove nothing, and fails.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src import test_util

import attn_dispatch
from attn_dispatch.core import select

MODES = ("replaced", "reference")

_theirs = jax.nn.dot_product_attention
_calls = 0
_lowered: collections.Counter[str] = collections.Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jax-nn", choices=MODES, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    _replace(keeps_references=config.getoption("--jax-nn") == "reference")
    _count_implementations()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What tests on an NVIDIA GPU know of jax.nn's cuDNN calls is made true of ours."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        vars(module)["_check_cudnn_backend"] = _runs_on_cudnn
    # They skip cuDNN on CUDA 13, where jax.nn's graph gets no plan. Ours does.
    test_util.is_cuda_version_at_least = lambda *version: False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    before = _calls
    yield
    if _calls == before:
        pytest.fail("the test has passed without calling attn_dispatch.dot_product_attention")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lowered = ", ".join(f"{name} {count}" for name, count in sorted(_lowered.items()))
    device = jax.devices()[0].device_kind
    terminalreporter.write_line(f"{_calls} calls of attn_dispatch.dot_product_attention")
    terminalreporter.write_line(f"computed on {device} by: {lowered or 'nothing'} (calls lowered)")


def _replace(*, keeps_references: bool) -> None:
    def dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        global _calls
        if keeps_references and "implementation" in kwargs and kwargs["implementation"] is None:
            return _theirs(*args, **kwargs)
        _calls += 1
        return attn_dispatch.dot_product_attention(*args, **kwargs)

    jax.nn.dot_product_attention = dot_product_attention


def _count_implementations() -> None:
    choose = select.choose

    def counting(spec: Any, *args: Any) -> Any:
        implementation = choose(spec, *args)
        direction = "backward" if spec.is_backward else "forward"
        _lowered[f"{implementation.NAME} {direction}"] += 1
        return implementation

    select.choose = counting


def _runs_on_cudnn(function: Any, *args: Any, **kwargs: Any) -> bool:
    return "attn_dispatch_cudnn_" in jax.jit(function).lower(*args, **kwargs).as_text()
