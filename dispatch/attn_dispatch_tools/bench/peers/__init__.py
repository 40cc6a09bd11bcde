"""The packages that are compared. Each imports its package only when it is used.

A peer has a reason if it is absent. It returns the program of a cell, or raises with a reason.
"""

from __future__ import annotations

from attn_dispatch_tools.bench.peers import (
    dew_flash_attn,
    fa4_jax,
    flash_attn3_jax,
    jax_nn,
    ours,
    tokamax,
    torch_sdpa,
)
from attn_dispatch_tools.bench.peers.peer import Peer
from attn_dispatch_tools.terminal.name_patterns import matches


def all_peers(torch_python: str | None = None) -> list[Peer]:
    """Every peer, ours first; `torch_python` is the Python that torch is installed for."""
    return [
        *ours.PEERS, *jax_nn.PEERS, *dew_flash_attn.PEERS, *fa4_jax.PEERS, *flash_attn3_jax.PEERS,
        *tokamax.PEERS, *torch_sdpa.peers(torch_python),
    ]  # fmt: skip


def named(patterns: list[str], peers: list[Peer]) -> list[Peer]:
    """The peers that are named like one of the patterns ("ours*"), in their order.

    Raises:
      ValueError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(matches(peer.name, pattern) for peer in peers):
            names = ", ".join(peer.name for peer in peers)
            raise ValueError(f"expected a peer of {names}, got {pattern!r}")
    return [x for x in peers if any(matches(x.name, pattern) for pattern in patterns)]
