"""Calls written down, and the command `plan`, which plans them before they are made."""
