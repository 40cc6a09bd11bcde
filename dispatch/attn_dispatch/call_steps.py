"""The steps of all public calls: take the arguments, bring them into normal form, and compute."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeAlias

import jax
import jax.numpy as jnp

from attn_dispatch.call.arguments import Arguments, arguments_of
from attn_dispatch.call.foreign_names import check_names, signature_of
from attn_dispatch.call.layouts import rows_first
from attn_dispatch.call.normal_form import Call, normalise
from attn_dispatch.core import call_warnings, select
from attn_dispatch.core.primitive import attention
from attn_dispatch.semantics.array_scale import with_number_as_scale

Results: TypeAlias = jax.Array | tuple[jax.Array, ...]
"""The output; with a `return_…` argument, a tuple of the output and what was asked for."""
Two: TypeAlias = tuple[jax.Array, jax.Array]
Three: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
Four: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

No: TypeAlias = Literal[False]
Yes: TypeAlias = Literal[True]

P = ParamSpec("P")


def public_call(
    compute: Callable[[Arguments], Results],
) -> Callable[[Callable[P, Results]], Callable[P, Results]]:
    """Make a public call of its signature, a function without a body: `compute` computes it."""

    def decorated(signature: Callable[P, Results]) -> Callable[P, Results]:
        @functools.wraps(signature)
        def call(*args: P.args, **kwargs: P.kwargs) -> Results:
            check_names(signature, kwargs)
            try:
                bound = signature_of(signature).bind(*args, **kwargs)
            except TypeError:
                signature(*args, **kwargs)  # raises Python's own error
                raise
            return compute(arguments_of(bound))

        return call

    return decorated


def normal_form(arguments: Arguments) -> Call:
    """The checked call with these arguments.

    Raises:
      ValueError: if an argument is wrong; the message has what was expected and what was given.
    """
    return normalise(with_number_as_scale(rows_first(arguments)), select.names())


def run(call: Call, arguments: Arguments) -> Results:
    """The results of the public call: the output, then lse and maxima, if they are wanted."""
    call_warnings.note_line(call.options)
    out, *rows = attention(call.options, call.operands)
    is_swapped = call.options.meaning.heads_first_q
    results = [jnp.swapaxes(out, -3, -2) if is_swapped else out]
    if rows:
        # lse and the maxima are [B, N, T] inside; the caller gets them in the layout of query.
        lse, *row_max = rows if is_swapped else (jnp.swapaxes(x, -1, -2) for x in rows)
        if arguments.return_residual:
            results.append(jax.lax.stop_gradient(lse).astype(out.dtype))
        if arguments.return_lse:
            results.append(lse)
        if arguments.return_max_logits:
            results.append(jax.lax.stop_gradient(row_max[0]))
    return results[0] if len(results) == 1 else tuple(results)
