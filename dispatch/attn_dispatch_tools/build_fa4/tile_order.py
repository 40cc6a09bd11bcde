"""The order in which a GPU takes the tiles of a call: those with most work first.

Part of export_kernels.py, which makes CUTLASS's DSL ready before it imports this. Unless a kernel
is causal itself, the package takes all tiles of one head, then those of the next. But in most masks
the last rows see the most keys, and the first keys are seen by the most rows: by all of them, if
they are sinks. Where such a tile comes late, the other processors wait for it at the end.
"""

from __future__ import annotations

import dataclasses

from fa4_jax.cute import flash_bwd_sm90, flash_fwd_sm90
from fa4_jax.cute.tile_scheduler import SingleTileLPTBwdScheduler, SingleTileLPTScheduler

_PARTS = 4
"""The heads that are taken together are as many as fit the L2 cache with one part of their rows. A
mask's tiles read few rows at a time. Of 32,768 rows, a whole head of 128 would fill it alone."""


class LastRowsFirst(SingleTileLPTScheduler):
    """Takes the last rows of some heads, whose keys and values fit the L2 cache, then those before
    them."""

    @staticmethod
    def to_underlying_arguments(args, **place):
        args = dataclasses.replace(args, lpt=True)
        return SingleTileLPTScheduler.to_underlying_arguments(args, **place)


class FirstKeysFirst(SingleTileLPTBwdScheduler):
    """Takes the first keys of some heads, then those after them."""

    @staticmethod
    def to_underlying_arguments(args, **place):
        # The length says how large a head is. Nothing else depends on it.
        args = dataclasses.replace(args, seqlen_k=args.seqlen_k // _PARTS + 1)
        return SingleTileLPTBwdScheduler.to_underlying_arguments(args, **place)


def install() -> None:
    """Let the kernels for sm90 that are compiled from now on take tiles in this order."""
    flash_fwd_sm90.SingleTileScheduler = LastRowsFirst
    flash_bwd_sm90.SingleTileScheduler = FirstKeysFirst
