"""A training step of a decoder at 32,768 tokens with a mask that is not causality alone.

usage: python benchmarks/model_masks.py [--rounds N] [--seconds S] [--out FOLDER]

The model of model.py (870 million parameters, 32 query heads, 8 kv heads, head dim 128), with a
prefix of 8,192 tokens, and with images of 4,096 tokens that see all of themselves. Attention is our
call with FlashAttention-4's compiled kernels, with cuDNN and with XLA, or jax.nn's with the mask as
an array over all pairs. A step that takes seconds is run once, and has no turns.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from command import arguments, save
from model import DIM, HEADS, HIDDEN, KV_HEADS, Attention, Steps, none, train_step

from attn_dispatch_tools.bench.arrays import CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.mask_shares import shares
from attn_dispatch_tools.bench.masks import Mask
from attn_dispatch_tools.bench.peers.jax_nn import JaxNn
from attn_dispatch_tools.bench.peers.ours import Ours
from attn_dispatch_tools.bench.peers.peer import JaxPeer, PeerCall, first_line
from attn_dispatch_tools.reports.environment import environment

TOKENS = 32768
MASKS = {
    "prefix of 8,192": Mask(prefix=8192),
    "images of 4,096": Mask(image=4096, has_ends=True),
}
PEERS: tuple[JaxPeer, ...] = (
    Ours("fa4"), Ours("cudnn"), JaxNn("cudnn"), Ours("xla"), JaxNn("xla"),
)  # fmt: skip
MAX_TURN_SECONDS = 2.0
"""The longest step that takes turns."""


def attention_of(call: PeerCall) -> Attention:
    """A peer's call for rows without a batch axis."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *further: jax.Array) -> jax.Array:
        return call.function(q[None], k[None], v[None], *further)[0]

    return attention


def measure(mask: Mask, rounds: int, seconds: float) -> tuple[Steps, dict[str, str]]:
    """The timed steps with a mask, and why other peers have none."""
    cell = Cell("masks", "model", 1, TOKENS, HEADS, KV_HEADS, DIM, DIM, mask=mask)
    arrays, steps, refused = CellArrays(cell), Steps(TOKENS), {}
    positions, is_real = jnp.arange(TOKENS), jnp.ones(TOKENS, bool)
    x = jax.random.normal(jax.random.key(1), (TOKENS, HIDDEN), jnp.bfloat16)
    steps.add("none", train_step(none, positions, is_real), x)
    for peer in PEERS:
        try:
            if absent := peer.absent():
                raise NotImplementedError(absent)
            call = peer.call(cell, arrays)
            step = train_step(attention_of(call), positions, is_real)
            if steps.add(peer.name, step, x, *call.further_arrays) > MAX_TURN_SECONDS:
                steps.leave_out(peer.name)
        except Exception as error:  # memory and refusals alike are what readers want to know
            refused[peer.name] = first_line(error)
    steps.take_turns(rounds, seconds, least=1)
    return steps, refused


def main() -> None:
    args = arguments("A training step of a decoder with masks.", rounds=4, seconds=0.3)
    facts, found = environment(), {}
    print(f"{facts['device']}, cuDNN {facts['cudnn']}, JAX {facts['jax']}, {TOKENS:,} tokens")
    for name, mask in MASKS.items():
        steps, refused = measure(mask, args.rounds, args.seconds)
        print(f"{name}: {100 * shares(mask, TOKENS).tiles:.0f} % of a causal call's tiles")
        steps.show()
        for peer, reason in refused.items():
            print(f"{peer:26s}{reason}")
        row: dict[str, Any] = {"steps": steps.found, "refused": refused}
        found[name] = row
    save("model_masks", {"environment": facts, "tokens": TOKENS, "masks": found}, args.out)


if __name__ == "__main__":
    main()
