"""The arrays of a call."""

from __future__ import annotations

from collections.abc import Mapping

import jax

Operands = Mapping[str, jax.Array]
"""The arrays of a call, by the names of its spec's operands."""
