"""What integrations say once at the line of the caller's program."""

from __future__ import annotations

from attn_dispatch.warning import AttentionConventionWarning, warn_once


def warn_of_difference(message: str) -> None:
    """Say what a framework asks for that has no counterpart here."""
    warn_once(message, AttentionConventionWarning)
