"""FlashAttention-4's kernels for sm100, with lists of tiles, a mask of ours and grouped heads.

Part of export_kernels.py, which makes CUTLASS's DSL ready before it imports this.

They differ from sm90's in what they are built from, not in the arguments that they are launched
with. A line of the forward kernel's lists is two tiles of 128 query rows, which it has at a time.
How many query heads share a key head is a constant in them as well; each function that divides by
it takes it from shapes here.
"""

from __future__ import annotations

from contextlib import contextmanager

from fa4_jax.cute.flash_bwd_sm100 import FlashAttentionBackwardSm100
from fa4_jax.cute.flash_fwd_sm100 import FlashAttentionForwardSm100
from fa4_jax.cute.mask import AttentionMask

SUMS = (100, 128, 128, 1, False)
"""How the backward kernel lays sums out: for sm100, 128 rows, and as 128 threads read them."""


def _apply_without_divisions(name, place):
    """Lets a function that applies a mask to a tile of pairs ignore the divisors in that place of
    its arguments. In some tiles, the package divides both indices by the lengths, so that no mask
    reads past its arrays. Ours clips them."""
    apply = getattr(AttentionMask, name)

    def applied(self, *arguments):
        return apply(self, *arguments[:place], (None, None), *arguments[place + 1 :])

    setattr(AttentionMask, name, applied)


_apply_without_divisions("apply_mask_mod_sm100_scalar", 9)
_apply_without_divisions("apply_mask_mod_sm100_transposed", 11)


@contextmanager
def _shared_heads(kernel, heads, kv_heads):
    constant = kernel.qhead_per_kvhead
    kernel.qhead_per_kvhead = heads // kv_heads
    try:
        yield
    finally:
        kernel.qhead_per_kvhead = constant


class Forward(FlashAttentionForwardSm100):
    def load(self, score_mma, value_mma, q, k, *rest, **named):
        # These are [rows, dim, heads, batch].
        with _shared_heads(self, q.shape[2], k.shape[2]):
            return super().load(score_mma, value_mma, q, k, *rest, **named)


class Backward(FlashAttentionBackwardSm100):
    """The backward kernel of grouped heads."""

    def load(self, *arguments, **named):
        q, k = arguments[5:7]  # [rows, dim, heads, batch]
        with _shared_heads(self, q.shape[2], k.shape[2]):
            return super().load(*arguments, **named)

    def compute_loop(self, *arguments):
        value_sums, lists = arguments[10], arguments[-1]
        heads, kv_heads = lists.mask_block_cnt.shape[1], value_sums.shape[1]
        with _shared_heads(self, heads, kv_heads):
            return super().compute_loop(*arguments)


def forward(head_dim, head_dim_v, mask):
    return Forward(
        head_dim,
        head_dim_v,
        qhead_per_kvhead=1,
        is_causal=False,
        is_local=False,
        pack_gqa=False,
        m_block_size=128,
        n_block_size=128,
        q_stage=2,
        is_static_persistent=False,
        mask_mod=mask,
        has_aux_tensors=True,
    )


def backward(head_dim, head_dim_v, shared_heads, mask):
    kernel = FlashAttentionBackwardSm100 if shared_heads == 1 else Backward
    return kernel(
        head_dim,
        head_dim_v,
        is_causal=False,
        is_local=False,
        qhead_per_kvhead=int(shared_heads),
        tile_m=128,
        tile_n=128,
        deterministic=False,
        mask_mod=mask,
        has_aux_tensors=True,
    )
