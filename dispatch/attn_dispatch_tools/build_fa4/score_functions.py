"""Score_mods as functions for the kernels: straight-line code in terms of CUTLASS's DSL.

Part of export_kernels.py, which makes the DSL ready before it imports this. The code is that of
attn_dispatch's programs/scalar_code.py: "f0 = mul(x, 0.02); f1 = tanh(f0); return f1".
"""

from __future__ import annotations

import re

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cutlass_dsl import select_
from fa4_jax.cute import softmax
from fa4_jax.cute.utils import scalar_to_ssa


def _typed(x):
    """A constant as a value of the DSL."""
    if isinstance(x, bool):
        return Boolean(x)
    if isinstance(x, int):
        return Int32(x)
    return Float32(x) if isinstance(x, float) else x


def _select(condition, yes, no):
    yes, no = _typed(yes), _typed(no)
    return type(yes)(select_(condition, yes, no))


def _read(array, index):
    last = array.shape[0] - 1
    return array[cutlass.min(cutlass.max(_typed(index), 0), last)]


def _fast(function):
    """A function in the hardware's own approximation, as everywhere in these kernels. Its error is
    2^-11 of the result for tanh, and otherwise some 2^-21."""
    return lambda x: function(x, fastmath=True)


def _periodic(function):
    """sin or cos in the hardware's approximation, which is for numbers around 0."""

    def of_any(x):
        turns = cute.math.roundeven(x * 0.15915494309189535)
        # 2 pi in two parts, of which the first has few digits, so that its products are exact.
        near = x - turns * 6.28125 - turns * 0.0019353071795864769
        return function(near, fastmath=True)

    return of_any


def _quotient(x, y):
    """The quotient of integers, rounded towards 0."""
    x, y = _typed(x), _typed(y)
    found = _absolute(x) // _absolute(y)
    return _select((x < 0) ^ (y < 0), -found, found)


def _absolute(x):
    return _select(x < 0, -x, x)


def _sign(x):
    return _select(x > 0, 1, _select(x < 0, -1, 0))


_OPERATIONS = {
    "inf": float("inf"),
    "nan": float("nan"),
    "true": True,
    "false": False,
    "read": _read,
    "select": _select,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: _typed(x) - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: _typed(x) / y,
    "quotient": _quotient,
    "remainder": lambda x, y: x - _quotient(x, y) * y,
    "max": lambda x, y: cutlass.max(_typed(x), _typed(y)),
    "min": lambda x, y: cutlass.min(_typed(x), _typed(y)),
    "neg": lambda x: -x,
    "abs_": cute.math.absf,
    "abs_int": _absolute,
    "sign_int": _sign,
    "to_float": Float32,
    "to_int": Int32,
    "eq": lambda x, y: _typed(x) == y,
    "ne": lambda x, y: _typed(x) != y,
    "lt": lambda x, y: _typed(x) < y,
    "le": lambda x, y: _typed(x) <= y,
    "gt": lambda x, y: _typed(x) > y,
    "ge": lambda x, y: _typed(x) >= y,
    "and_": lambda x, y: _select(x, y, False),
    "or_": lambda x, y: _select(x, True, y),
    "xor_": lambda x, y: _select(x, _select(y, False, True), y),
    "not_": lambda x: _select(x, False, True),
    "and_bits": lambda x, y: _typed(x) & _typed(y),
    "or_bits": lambda x, y: _typed(x) | _typed(y),
    "xor_bits": lambda x, y: _typed(x) ^ _typed(y),
    "not_bits": lambda x: _typed(x) ^ -1,
    "pow_": lambda x, y: cute.math.pow(_typed(x), _typed(y)),
    "tanh": _fast(cute.math.tanh),
    "exp": _fast(cute.math.exp),
    "exp2": _fast(cute.math.exp2),
    "log": _fast(cute.math.log),
    "exact_log": cute.math.log,
    "log1p": lambda x: cute.math.log(x + 1.0, fastmath=True),
    "expm1": lambda x: cute.math.exp(x, fastmath=True) - 1.0,
    "sin": _periodic(cute.math.sin),
    "cos": _periodic(cute.math.cos),
    "erf": cute.math.erf,
    "sqrt": cute.math.sqrt,
    "rsqrt": cute.math.rsqrt,
    "ceil": cute.math.ceil,
    "floor": cute.math.floor,
    "round_even": cute.math.roundeven,
}


def _function(parameters, code):
    """Code as a function of these parameters and of the list of arrays."""
    count = 1 + max((int(x) for x in re.findall(r"\bo(\d+)", code)), default=-1)
    arrays = [f"o{i} = arrays[{i}]" for i in range(count)]
    body = "".join(f"    {x}\n" for x in (*arrays, *code.split("; ")))
    namespace = dict(_OPERATIONS)
    exec(f"def function({parameters}, arrays):\n{body}", namespace)
    return namespace["function"]


def score_mod(code, first, only_rows=False):
    """The change of a score, as the kernels call it.

    Args:
      code: from the score x to the softmax's input.
      first: the number of the kernel's arrays before those of the code.
      only_rows: give -inf past the last row. There the backward kernel computes weights that it
        multiplies by gradients of 0; a weight of infinity would make them NaN.
    """
    function = _function("x, b, n, t, s", code)

    def changed(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        t = q_idx[0]
        x = _typed(function(score[0], batch[0], head[0], t, kv_idx[0], aux_tensors[first:]))
        if only_rows:
            x = _select(t < seqlen_info.seqlen_q, x, -float("inf"))
        return scalar_to_ssa(x, Float32)

    return changed


def score_mod_gradient(code, first):
    """The gradient of a score, as the backward kernel calls it."""
    function = _function("g, x, b, n, t, s", code)

    def gradient(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        inputs = (x[0] for x in (grad, score, batch, head, q_idx, kv_idx))
        return scalar_to_ssa(_typed(function(*inputs, aux_tensors[first:])), Float32)

    return gradient


def _with_plain_indices(function, fastdiv_at):
    """The package's loop over a tile's scores, without its changes of indices.

    It would divide both indices by the lengths, so that no mod reads past its arrays; `read` clips
    indices instead. In the backward pass of grouped heads it would take rows for those of heads
    that are packed into one tile, which these are not.
    """

    def applied(*arguments, **named):
        arguments = list(arguments)
        arguments[fastdiv_at] = None
        return function(*arguments, **named | {"qhead_per_kvhead": 1})

    return applied


def replace_loops(*modules):
    """Let these modules of the package apply score_mods with plain indices."""
    for module in modules:
        module.apply_score_mod_inner = _with_plain_indices(softmax.apply_score_mod_inner, 9)
        if hasattr(module, "apply_score_mod_bwd_inner"):
            loop = _with_plain_indices(softmax.apply_score_mod_bwd_inner, 10)
            module.apply_score_mod_bwd_inner = loop
