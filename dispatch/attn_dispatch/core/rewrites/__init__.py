"""The rewrites: calls that a vendor's kernels refuse, replaced by calls that they run, exactly.

A rewrite is a record (rewrite.py), and the list of them is in catalogue.py. search.py asks, rewrite
by rewrite, which of them bring a call to a kernel; the answer is a `Chain`, which computes the call
and whose names `explain` shows.
"""

from attn_dispatch.core.rewrites.catalogue import ONE_BY_ONE, REWRITES, preferred
from attn_dispatch.core.rewrites.chain import Chain, Step, divided
from attn_dispatch.core.rewrites.rewrite import Calls, Compute, NamedArrays, Rewrite
from attn_dispatch.core.rewrites.search import Reasons, Terms, rewritten

__all__ = [
    "ONE_BY_ONE",
    "REWRITES",
    "Calls",
    "Chain",
    "Compute",
    "NamedArrays",
    "Reasons",
    "Rewrite",
    "Step",
    "Terms",
    "divided",
    "preferred",
    "rewritten",
]
