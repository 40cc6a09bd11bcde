"""The lists of `explain_program`, compared with the kernels in the lowered programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax

from attn_dispatch import ProgramExplanation, explain_program, target, whole_programs
from tests.support.lowered import kernel_runs

Kernels = Counter[tuple[str, int]]
"""How often each kernel runs, by its custom call and the number of elements of the query."""


def listed(found: ProgramExplanation) -> Kernels:
    """The kernels in a list."""
    runs: Kernels = Counter()
    for call in found.calls:
        query = math.prod(call.explanation.call.shape("query"))
        for direction, chosen, times in (
            ("forward", call.explanation.chosen_forward, call.forward_runs.times),
            ("backward", call.explanation.chosen_backward, call.backward_runs.times),
        ):
            if times:
                runs[f"attn_dispatch_{chosen}_{direction}", query] += times
    return runs


def checked(function: Any, *args: Any, mesh: Any = None) -> ProgramExplanation:
    """The list of a program for an H100, which must have the kernels of the lowered program."""
    found = explain_program(function, *args, target="h100", mesh=mesh)
    with target("h100"):
        lowered = kernel_runs(*of_arrays(function, args))
    expected = Counter({k: n for k, n in lowered.items() if "attn_" in k[0]})
    assert found.calls and listed(found) == expected, f"{listed(found)} is not {expected}"
    return found


def specs_listed(function: Any, *args: Any) -> tuple[list[str], ProgramExplanation]:
    """The calls of one device in the list of a program, of either direction, and the list."""
    pairs: list[Any] = []
    explained = whole_programs._explained

    def recorded(pair: Any, device: Any) -> Any:
        pairs.append(pair)
        return explained(pair, device)

    with mock.patch.object(whole_programs, "_explained", recorded):
        found = explain_program(function, *args)
    specs = {str(x) for pair in pairs for x in (pair.forward, pair.backward) if x is not None}
    return sorted(specs), found


def of_arrays(function: Any, args: Any) -> tuple[Callable[..., Any], dict[int, Any]]:
    """The program as a function of one dictionary of arrays, and that dictionary.

    `jax.jit` takes arrays alone; a module may also hold flags and functions.
    """
    leaves, tree = jax.tree.flatten(args)

    def called(arrays: dict[int, Any]) -> Any:
        return function(*jax.tree.unflatten(tree, [arrays.get(i, x) for i, x in enumerate(leaves)]))

    return called, {i: x for i, x in enumerate(leaves) if hasattr(x, "shape")}


def struct(*shape: int, dtype: Any = "bfloat16", sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
