"""`jax.nn.dot_product_attention`, replaced where it is called by that name."""

from __future__ import annotations

import jax

from attn_dispatch.api import dot_product_attention
from attn_dispatch.integrations.patching import Patch


def patch_jax_nn() -> Patch:
    """`jax.nn.dot_product_attention` is ours, for code that nobody can change.

        with patch_jax_nn():
            ...
        patch_jax_nn().start()  # for good

    Its arguments, and what they mean, are a subset of ours. What differs is written in
    docs/semantics.md: above all a row that may attend to no key is 0, and not the mean of all
    values.

    Not seen by the patch: functions that were imported before by `from jax.nn import
    dot_product_attention`, programs that were traced before (what `jax.jit` has traced once it does
    not trace again), and names of JAX's own modules below jax.nn. The patch is the whole process's:
    a thread that calls jax.nn meanwhile calls ours.

    Returns:
      A `Patch`, which has not been started.
    """
    return Patch({(jax.nn, "dot_product_attention"): dot_product_attention})
