"""Tests that AXLearn's remat policy for attention keeps the output and lse of attn_dispatch.

Run it with PYTHONPATH=PATCHED_SOURCE:dispatch, where PATCHED_SOURCE is AXLearn with axlearn.patch.
"""

# ruff: noqa: E402
import stand_ins
import trainers

stand_ins.install(trainers.AXLEARN.stand_ins)  # before AXLearn

import contextlib
import io
import sys

import jax
import jax.numpy as jnp
from axlearn.common.attention_bias import ZeroAttentionBias
from axlearn.common.flash_attention.attn_dispatch_attention import AttnDispatchFlashAttention
from axlearn.common.flash_attention.remat import save_or_offload_flash_attention_policy
from jax.ad_checkpoint import print_saved_residuals


def main() -> int:
    query = jnp.ones((1, 16, 2, 8))
    batch = {"key": query, "value": query, "bias": ZeroAttentionBias(), "logit_sink": None}
    attention = AttnDispatchFlashAttention.default_config().instantiate()
    if not attention.is_supported({**batch, "query": query}, kv_cache_type=None):
        raise AssertionError("expected a call that is supported")

    def kept(policy) -> list[str]:
        """The shapes of the arrays that the policy keeps, without arguments and constants."""

        def layer(query):
            return attention({**batch, "query": jnp.sin(query)}).sum()

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            print_saved_residuals(jax.checkpoint(layer, policy=policy), query)
        lines = printed.getvalue().splitlines()
        return sorted(x.partition(" ")[0] for x in lines if " output of " in x)

    with_policy = kept(save_or_offload_flash_attention_policy())
    without = kept(jax.checkpoint_policies.nothing_saveable)
    print(f"kept with the policy: {with_policy}; without: {without}")
    return int(with_policy != ["f32[1,16,2,8]", "f32[1,2,16]"] or without != [])


if __name__ == "__main__":
    sys.exit(main())
