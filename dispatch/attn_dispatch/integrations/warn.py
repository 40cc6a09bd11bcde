"""Warnings of integrations, issued once at the line of the caller's program."""

from __future__ import annotations

from attn_dispatch.warning import AttentionConventionWarning, warn_once


def warn_of_difference(message: str) -> None:
    """Warn of an argument of the framework that has no counterpart in attn_dispatch."""
    warn_once(message, AttentionConventionWarning)
