"""The attention layers of a model that `replace_attention` leaves as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attn_dispatch.integrations.merging import text_of
from attn_dispatch.warning import warn_of_convention

_ATTENTION = re.compile(r"(?!.*linear).*(attention|attn)(layer)?", re.IGNORECASE)


def has_name_of_attention(layer: object) -> bool:
    """Whether a layer's class is named like softmax attention, such as SelfAttention."""
    return _ATTENTION.fullmatch(type(layer).__name__) is not None


def warn_of_staying(staying: Sequence[str], options: Mapping[str, object], remedy: str) -> None:
    """Warn of the layers that stay in a model of which others were replaced.

    Args:
      staying: each layer's place and type.
      options: what `replace_attention` was given.
      remedy: what to do instead, as the end of a sentence.
    """
    if staying:
        lost = ", ".join(f"{name}={text_of(value)}" for name, value in options.items())
        warn_of_convention(
            f"replace_attention: these layers stay as they are{f', without {lost}' * bool(lost)}: "
            f"{'; '.join(dict.fromkeys(staying))}. {remedy}"
        )
