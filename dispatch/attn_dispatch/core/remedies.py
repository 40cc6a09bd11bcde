"""What to do about a reason against a vendor's kernel, in the words of the public call."""

from __future__ import annotations

import re

_REMEDIES = (
    (r"needs float16 or bfloat16", "cast query, key and value to bfloat16"),
    (r"segment ids: pass max_segments", "pass max_segments, the largest id that any row may hold"),
    (r"local_window_size as an array", "jax.lax.switch over calls with static windows"),
    (r"^scale: .* multiplies by it in float32", "multiply query by the scale, and pass scale=1"),
    (
        r"packed sequences: .* counts a bias or mask",
        "say it with causality, a window or segment ids, or pass a padded batch with lengths",
    ),
    (r"packed sequences: the dropout mask", "ask for the mask of a call that is not packed"),
    (r"(sinks|alibi_slopes): .* has one for each head", "pass [N], or make a call per batch row"),
    (
        r"gradient of a bias that is the same for all keys",
        "leave that bias out, or jax.lax.stop_gradient of it: with no sink it changes lse alone",
    ),
    (
        r"gradient of alibi_slopes",
        "jax.lax.stop_gradient of the slopes before the call, if they are constants",
    ),
    (
        r"gradient of what score_mod reads",
        "jax.lax.stop_gradient of the arrays before the call, if they are constants",
    ),
    (r"may be NaN where the mask forbids", "say the mask in mask_mod"),
    (r"sinks beside a mask_mod", "say mask_mod with causality, a window, lengths or a mask"),
    (r"^dropout_rate: CK", "a multiple of 1/256"),
    (r"^dropout: XLA would go back", "make calls for a part of the batch each"),
    (r"dropout keys? ", "pass one dropout_key for the whole batch"),
    (r"dropout: .* has one key", "pass one dropout_key for the whole batch"),
    (r"from the bottom right of lengths", "pass the distances as a bias"),
    (r"no such bottom-right mask together", "the top-left mask is the same where T == S"),
    (r"^scratch memory: ", "a larger scratch_limit"),
    (r"^mask: not run", "say it with lengths, a window or segment ids"),
    (r"^bias: AITER needs query's dtype", "cast the bias to query's dtype"),
    (r"bias and alibi_slopes in one call", "add ALiBi's distances to the bias"),
    (
        r"for all but a plain, single query",
        "none is needed: it is rewritten, where that is not off",
    ),
    (r"wants a power of two", "make pages of 16, 64 or 256 keys"),
    (r"an axis has length zero", "none is needed"),
    (r"^heads wider than|^2\^31 queries or keys", "none; XLA runs such calls"),
)
"""A pattern of reasons, and the remedy. What has none here can only be left to XLA."""


def with_remedy(reason: str) -> str:
    """The reason, and what can be done about it where that is known."""
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, reason):
            return f"{reason} (remedy: {remedy})"
    return reason
