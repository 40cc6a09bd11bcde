"""The packages that are compared. Each module imports its package only when it is used.

An absent peer says why. A present one returns the program of a cell, or raises an error that says
why it has none.
"""

from __future__ import annotations

from attn_dispatch_tools.bench.peers import (
    dew_flash_attn,
    flash_packages,
    jax_nn,
    ours,
    tokamax,
    torch_sdpa,
)
from attn_dispatch_tools.bench.peers.peer import Peer
from attn_dispatch_tools.terminal.name_patterns import matches


def all_peers(torch_python: str | None = None) -> list[Peer]:
    """All peers, ours first. `torch_python` is the Python that has torch; by default this one."""
    return [
        *ours.PEERS, *jax_nn.PEERS, *dew_flash_attn.PEERS, *flash_packages.PEERS, *tokamax.PEERS,
        *torch_sdpa.peers(torch_python),
    ]  # fmt: skip


def named(patterns: list[str], peers: list[Peer]) -> list[Peer]:
    """The peers whose names match a pattern such as "ours*", in the order of `peers`.

    Raises:
      ValueError: a pattern matches no peer.
    """
    for pattern in patterns:
        if not any(matches(peer.name, pattern) for peer in peers):
            names = ", ".join(peer.name for peer in peers)
            raise ValueError(f"--peer: expected a pattern for {names}; got {pattern!r}")
    return [x for x in peers if any(matches(x.name, pattern) for pattern in patterns)]
