"""The types that editors and type checkers see: results by `return_…`, and the names of choices.

`make lint` checks the assertions of types in this file, and that each wrong name is an error.
"""

# pyright: reportArgumentType=true, reportCallIssue=true, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any, assert_type, get_args, get_overloads, get_type_hints

import jax
import jax.numpy as jnp
import pytest
from jax.typing import ArrayLike

from attn_dispatch import (
    api,
    assert_kernels,
    context_parallel,
    dot_product_attention,
    fallback,
    paged,
    paged_attention,
    ragged,
    ragged_dot_product_attention,
    sharded_dropout,
)
from attn_dispatch.call.keywords import DenseOptions, PagedOptions, RaggedOptions
from attn_dispatch.core import select
from attn_dispatch.devices.target import PRODUCTS, Target
from attn_dispatch.implementation import ImplementationName, OwnName

Array = jax.Array
Q = jnp.ones((1, 2, 1, 8))
TABLE, LENGTHS = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
CU = jnp.array([0, 2])


def typed(flag: bool) -> None:
    """Never called. Type checkers read it."""
    call = dot_product_attention
    assert_type(call(Q, Q, Q, is_causal=True), Array)
    assert_type(call(Q, Q, Q, return_lse=False), Array)
    assert_type(call(Q, Q, Q, return_lse=True), tuple[Array, Array])
    assert_type(call(Q, Q, Q, return_residual=True), tuple[Array, Array])
    assert_type(call(Q, Q, Q, return_lse=True, return_max_logits=True), tuple[Array, Array, Array])
    assert_type(call(Q, Q, Q, return_lse=flag), Array | tuple[Array, ...])
    out = ragged_dot_product_attention(
        Q[0], Q[0], Q[0], cu_seqlens_q=CU, cu_seqlens_kv=CU, max_seqlen_q=2, max_seqlen_kv=2,
        return_lse=True,
    )  # fmt: skip
    assert_type(out, tuple[Array, Array])
    assert_type(paged_attention(Q, Q, Q, TABLE, LENGTHS), Array)
    assert_type(paged_attention(Q, Q, Q, TABLE, LENGTHS, return_lse=True), tuple[Array, Array])

    call(Q, Q, Q, implementation=["cudnn", OwnName("toy")])
    call(Q, Q, Q, implementation="cuddn")  # pyright: ignore[reportArgumentType, reportCallIssue]
    call(Q, Q, Q, implementation=["cuddn"])  # pyright: ignore[reportArgumentType, reportCallIssue]
    call(Q, Q, Q, qkv_layout="BHTD")  # pyright: ignore[reportArgumentType, reportCallIssue]
    call(Q, Q, Q, causal_alignment="bottom")  # pyright: ignore[reportArgumentType, reportCallIssue]
    call(Q, Q, Q, sequence_order="zig-zag")  # pyright: ignore[reportArgumentType, reportCallIssue]
    call(Q, Q, Q, causal=True)  # pyright: ignore[reportCallIssue]
    assert_kernels(call, Q, implementations=["cudnn", OwnName("toy")])
    assert_kernels(call, Q, implementations="cuddn")  # pyright: ignore[reportArgumentType]
    fallback("raise")  # pyright: ignore[reportArgumentType]
    context_parallel("ulysses")  # pyright: ignore[reportArgumentType]
    sharded_dropout("equal")  # pyright: ignore[reportArgumentType]


CALLS: dict[Callable[..., Any], type] = {
    dot_product_attention: DenseOptions,
    ragged_dot_product_attention: RaggedOptions,
    paged_attention: PagedOptions,
}


def of_arrays(annotation: Any) -> Any:
    """The annotation of a generic argument, with what an array is filled in."""
    return annotation[ArrayLike] if getattr(annotation, "__parameters__", ()) else annotation


@pytest.mark.parametrize("call", CALLS, ids=lambda x: x.__name__)
def test_every_overload_has_the_arguments_of_the_call_with_their_types(call: Callable[..., Any]):
    hints, parameters = get_type_hints(call), inspect.signature(call).parameters
    overloads = get_overloads(call)
    assert overloads
    for each in overloads:
        named = {name: x for name, x in get_type_hints(each).items() if name != "options"}
        options = get_type_hints(CALLS[call]).items()
        given = named | {name: of_arrays(x) for name, x in options}
        assert given.keys() == hints.keys()
        flags = {x for x in given if x.startswith("return_")} | {"return"}
        assert {x: y for x, y in given.items() if x not in flags} == {
            x: y for x, y in hints.items() if x not in flags
        }
        defaults = {x: y.default for x, y in inspect.signature(each).parameters.items()}
        for name in named.keys() - {"return"}:
            assert defaults[name] in (parameters[name].default, inspect.Parameter.empty)


def test_overloads_give_each_choice_of_results_its_tuple():
    """With every combination of flags, the first overload that accepts it has the right result."""
    for module, call in ((api, dot_product_attention), (ragged, ragged_dot_product_attention),
                         (paged, paged_attention)):  # fmt: skip
        flags = [x for x in inspect.signature(call).parameters if x.startswith("return_")]
        assert call.__module__ == module.__name__
        for chosen in itertools.product((False, True), repeat=len(flags)):
            given = dict(zip(flags, chosen, strict=True))
            fitting = (
                hints["return"]
                for hints in map(get_type_hints, get_overloads(call))
                if all(value in get_args(hints[name]) for name, value in given.items())
            )
            count = 1 + sum(chosen)
            assert next(fitting) == (Array if count == 1 else tuple[(Array,) * count])


def test_names_for_type_checkers_are_those_that_exist():
    assert get_args(ImplementationName) == select.names()
    _, products = get_args(Target)
    assert get_args(products) == tuple(PRODUCTS)
