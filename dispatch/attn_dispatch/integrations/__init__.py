"""The call as the attention of other packages: a file for each, imported by its name.

`attn_dispatch.integrations.flax` imports Flax, `.equinox` Equinox, and so on; this package imports
none of them. Each hands on what its framework says (masks, dropout, dtypes, weights that are to be
kept), and says once what has no counterpart here. docs/integrations.md has an example of each.
"""

from attn_dispatch.integrations.jax_nn import patch_jax_nn

__all__ = ["patch_jax_nn"]
