"""Calls written down, and the commands `plan` and `tune`, which prepare for them."""
