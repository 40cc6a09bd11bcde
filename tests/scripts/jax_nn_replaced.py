"""A pytest plugin for JAX's tests that replaces `jax.nn.dot_product_attention` by our call.

With `--jax-nn=replaced` every call is ours. JAX's tests compute their references by the same
function with `implementation=None`, so that our call is compared with itself: this shows that it
takes the same arguments and returns results of the same kind. With `--jax-nn=reference` the calls
for references stay jax.nn's, which shows that the values agree.

A test that passes without calling our function would prove nothing, and is made to fail.
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
    """Replace the function before any test module is imported."""
    _replace(keeps_references=config.getoption("--jax-nn") == "reference")
    _count_implementations()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adapt the helpers by which tests on an NVIDIA GPU recognise jax.nn's cuDNN calls."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        vars(module)["_check_cudnn_backend"] = _runs_on_cudnn
    # The tests skip cuDNN on CUDA 13, where cuDNN has no plan for jax.nn's graph but one for ours.
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
