"""The types of score_mod and mask_mod as callers write them: plain JAX functions of scalars."""

from __future__ import annotations

from collections.abc import Callable

from jax.typing import ArrayLike

ScoreMod = Callable[..., ArrayLike]
"""(score, b, n, t, s, *arguments) -> score, of scalars."""
MaskMod = Callable[..., ArrayLike]
"""(b, n, t, s, *arguments) -> bool, of scalars."""
