"""A patch that replaces `jax.nn.dot_product_attention`."""

from __future__ import annotations

import jax

from attn_dispatch.api import dot_product_attention
from attn_dispatch.integrations.patching import Patch, Tally

_TALLY = Tally("patch_jax_nn", "jax.nn.dot_product_attention")
_counted = _TALLY.counted(dot_product_attention)


def patch_jax_nn(*, may_be_unused: bool = False) -> Patch:
    """Replace `jax.nn.dot_product_attention` by attn_dispatch's, for code that cannot be changed.

        with patch_jax_nn():
            ...
        patch_jax_nn().start()  # for good

    The arguments of jax.nn, with their meaning, are a subset of attn_dispatch's. docs/semantics.md
    lists the differences: above all, a row that attends to no key is 0 rather than the mean of all
    values.

    The patch does not reach functions imported earlier by `from jax.nn import
    dot_product_attention`, programs traced earlier (`jax.jit` does not trace again), and names in
    JAX's modules below jax.nn. It applies to the whole process, other threads included. If nothing
    went through it, a warning at its end says so, and what ran instead.

    Args:
      may_be_unused: whether not to warn.

    Returns:
      A `Patch`, which has not been started.
    """
    return Patch({(jax.nn, "dot_product_attention"): _counted}, _TALLY, may_be_unused=may_be_unused)
