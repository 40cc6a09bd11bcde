"""Runnable examples; start one from the repository root with `python -m examples.<name>`."""
