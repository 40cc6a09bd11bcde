"""Attention in a program that is no call of attn_dispatch: matrix products, or another's kernel.

Attention in matrix products is a product (the scores), whose exponentials are summed and multiplied
into a second product. The facts of a walk lead from the first to the second, through whatever masks
and scales the scores on the way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from jax.extend.core import JaxprEqn, Literal, Var

from attn_dispatch.core.jax_compat import frames_of
from attn_dispatch.typed_jax import type_of
from attn_dispatch.whole_programs.places import Place, is_of_our_call, place_of
from attn_dispatch.whole_programs.runs import Runs, total


@dataclass(frozen=True)
class OtherAttention:
    """Attention in a program that is no call of attn_dispatch."""

    what: str
    """The operations or the kernel that compute it."""
    place: Place | None
    """The line that makes it; None if JAX did not keep it."""
    runs: Runs
    shape: str
    """The dtype and shape of the scores, or of a kernel's first operand."""

    def __str__(self) -> str:
        where = "an unknown line" if self.place is None else str(self.place)
        return f"{where}: {self.what}, {self.shape}, runs {self.runs}"


@dataclass(eq=False)
class _Scores:
    """A product that may be the scores of attention."""

    equation: JaxprEqn
    runs: Runs
    summed: set[int] = field(default_factory=set[int])
    """The sizes of the dims over which its exponentials are summed."""
    contracted: set[int] = field(default_factory=set[int])
    """The sizes of the dims over which its exponentials are multiplied into another product."""
    resized: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """The sizes of a dim of its exponentials before and after an operation such as a slice."""

    @property
    def is_attention(self) -> bool:
        return not self._summed_and_resized().isdisjoint(self.contracted)

    def _summed_and_resized(self) -> set[int]:
        """The sizes of the dims that are summed, also after slices: weights without a sink's."""
        found: set[int] = set()
        new = self.summed
        while new:
            found = found | new
            new = {after for before, after in self.resized if before in found} - found
        return found


@dataclass(frozen=True)
class Fact:
    """What is known of a value: the product that it comes from."""

    scores: _Scores
    is_exponential: bool = False


class OtherCalls:
    """Collects the attention of a program that is not ours, while it is walked."""

    def __init__(self) -> None:
        self._products: list[_Scores] = []
        self._kernels: list[OtherAttention] = []

    def rule(
        self, equation: JaxprEqn, given: Sequence[Fact | None], runs: Runs
    ) -> Sequence[Fact | None]:
        """The facts about the results of one operation, from those about its operands."""
        name = equation.primitive.name
        known = [x for x in given if x is not None]
        result: Fact | None = None
        if name == "dot_general":
            result = self._product(equation, given, runs)
        elif known and name in _KEEPING:
            result = max(known, key=lambda x: x.is_exponential)
            if name in _RESIZING:
                _note_sizes(equation, given)
        elif known and name in ("exp", "exp2"):
            result = replace(known[0], is_exponential=True)
        elif known and name == "reduce_sum" and known[0].is_exponential:
            shape = type_of(equation.invars[0]).shape
            axes = cast("Sequence[int]", equation.params["axes"])
            known[0].scores.summed.update(shape[i] for i in axes)
        elif kernel := _kernel(equation):
            first = equation.invars[0] if equation.invars else equation.outvars[0]
            self._kernels.append(_found(kernel, equation, runs, "first operand", first))
        return [result for _ in equation.outvars]

    def found(self) -> tuple[OtherAttention, ...]:
        """All attention that was collected, each line once."""
        products = [
            _found(_products_at(x.equation), x.equation, x.runs, "scores", x.equation.outvars[0])
            for x in self._products
            if x.is_attention and not is_of_our_call(x.equation)
        ]
        merged: dict[OtherAttention, list[Runs]] = {}
        for x in (*products, *self._kernels):
            merged.setdefault(replace(x, runs=Runs(0)), []).append(x.runs)
        return tuple(replace(x, runs=total(runs)) for x, runs in merged.items())

    def _product(self, equation: JaxprEqn, given: Sequence[Fact | None], runs: Runs) -> Fact | None:
        contracting, batch = cast(
            "tuple[tuple[Sequence[int], ...], tuple[Sequence[int], ...]]",
            equation.params["dimension_numbers"],
        )
        for fact, operand, dims in zip(given, equation.invars, contracting, strict=True):
            if fact is not None and fact.is_exponential:
                fact.scores.contracted.update(type_of(operand).shape[i] for i in dims)
        scores = _Scores(equation, runs)
        # Logits, and the scores of a router, are products with an array of parameters. In
        # attention both operands are computed, and nearly always there are batch dims.
        if batch[0] or None not in given:
            self._products.append(scores)
        return Fact(scores)


_KEEPING = frozenset(
    (
        *("add", "add_any", "sub", "mul", "div", "neg", "max", "min", "tanh", "select_n", "pow"),
        *("integer_pow", "square", "convert_element_type", "reduce_precision", "stop_gradient"),
        *("reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "dynamic_slice", "pad"),
        *("concatenate", "split", "dynamic_update_slice", "scatter", "copy", "copy_p", "rev"),
        *("sharding_constraint", "mesh_cast", "reshard"),
        *("optimization_barrier", "name", "pvary", "pcast", "psum", "all_gather", "gather"),
    )
)
"""Operations whose result is still what an operand was: scores, or their exponentials."""

_RESIZING = frozenset(("slice", "dynamic_slice", "pad", "concatenate", "split", "gather"))
"""Operations of these that change the sizes of dims and leave the dims in order."""


def _note_sizes(equation: JaxprEqn, given: Sequence[Fact | None]) -> None:
    for operand, fact in zip(equation.invars, given, strict=True):
        if fact is None or not fact.is_exponential:
            continue
        before = type_of(operand).shape
        for result in equation.outvars:
            after = type_of(result).shape
            if len(after) == len(before):
                fact.scores.resized.update(
                    (x, y) for x, y in zip(before, after, strict=True) if x != y
                )


_NAMES = re.compile("attention|attn|fmha|mha_|flash", re.IGNORECASE)

_CUDNN_OF_JAX = re.compile(r"dot_product_attention(_fp8)?_(fwd|bwd)(_wrapper)?")


def _kernel(equation: JaxprEqn) -> str:
    """The kernel that an operation runs, if its name says that it is attention; else ""."""
    name = equation.primitive.name
    if found := _CUDNN_OF_JAX.fullmatch(name):
        direction = "forward" if found[2] == "fwd" else "backward"
        return f"jax.nn.dot_product_attention on cuDNN, {direction}"
    params = cast("Mapping[str, object]", equation.params)
    names = [name, *(str(params.get(x, "")) for x in _NAMED_BY)]
    return next((f"{name} {x}".strip() for x in names[1:] if _NAMES.search(x)), "") or (
        name if _NAMES.search(name) else ""
    )


_NAMED_BY = ("target_name", "call_target_name", "name", "name_and_src_info")
"""The parameters of operations that hold the name of a kernel."""


def _products_at(equation: JaxprEqn) -> str:
    frames = frames_of(equation)
    if any(x.endswith("dot_product_attention") and _JAX_NN in file for file, _, x in frames):
        return "jax.nn.dot_product_attention on XLA"
    return "attention by matrix products: dot_general, softmax, dot_general"


_JAX_NN = "jax/_src/nn/"


def _found(
    what: str, equation: JaxprEqn, runs: Runs, name: str, value: Var | Literal
) -> OtherAttention:
    aval = type_of(value)
    shape = f"{name} {aval.dtype.name}{list(aval.shape)}"
    return OtherAttention(what, place_of(equation), runs, shape)
