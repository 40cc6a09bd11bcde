"""CallArguments and LayerOptions have the argument types of the public calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields

import pytest

from attn_dispatch import dot_product_attention, paged_attention, ragged_dot_product_attention
from attn_dispatch.call.arguments import Arguments
from attn_dispatch.call.keywords import CallArguments, LayerOptions
from attn_dispatch.inspection import dropout_mask, explain, spec_of, specs_of

CALLS = (dot_product_attention, paged_attention, ragged_dot_product_attention)


def signature_types() -> dict[str, str]:
    """The widest type of each argument in the signatures of the public calls."""
    found: dict[str, set[str]] = {}
    for call in CALLS:
        for name, parameter in inspect.signature(call).parameters.items():
            found.setdefault(name, set()).add(parameter.annotation)
    for name, texts in found.items():
        assert len({x.removesuffix(" | None") for x in texts}) == 1, (name, texts)
    return {name: max(texts, key=len) for name, texts in found.items()}


def keyword_types(keywords: type) -> dict[str, str]:
    """The types in a TypedDict, with ArrayLike for its type parameter A."""
    texts = {name: x.__forward_arg__ for name, x in keywords.__annotations__.items()}
    return {x: re.sub(r"\bA( \| None)?$", r"ArrayLike\1", y) for x, y in texts.items()}


def test_call_arguments_have_the_types_of_the_signatures():
    # `explain` also accepts a struct for a side of the window that the call traces.
    window = {"local_window_size": "Window | A | Sequence[Side | A]"}
    assert keyword_types(CallArguments) == signature_types() | window


def test_layer_options_have_the_types_of_the_signatures():
    types = signature_types()
    layer = keyword_types(LayerOptions)
    assert layer and layer == {name: types[name] for name in layer}


@pytest.mark.parametrize("function", [explain, dropout_mask, spec_of, specs_of])
def test_inspection_functions_take_typed_arguments(function):
    kwargs = inspect.signature(function).parameters["kwargs"].annotation
    assert kwargs.startswith("Unpack[CallArguments[")


@pytest.mark.parametrize("call", CALLS, ids=lambda x: x.__name__)
def test_signatures_have_the_types_of_the_arguments(call: Callable[..., object]):
    types = {x.name: x.type for x in fields(Arguments)}
    for name, parameter in inspect.signature(call).parameters.items():
        assert parameter.annotation.removesuffix(" | None") == types[name].removesuffix(" | None")
