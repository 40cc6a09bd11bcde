"""Compiled FlashAttention-4 on this CPU: its handlers, over a driver that runs nothing."""
