"""attn_dispatch as the attention of other packages, with a module for each.

`attn_dispatch.integrations.flax` imports Flax, `.equinox` Equinox, and so on; this package imports
none of them. Each module passes on its framework's arguments (masks, dropout, dtypes), and warns
once of those that have no counterpart here. docs/integrations.md has an example of each.
"""

from attn_dispatch.integrations.jax_nn import patch_jax_nn

__all__ = ["patch_jax_nn"]
