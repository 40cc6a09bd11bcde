"""Predicted times in what `explain` prints, which change whenever rates are fitted again."""

import re


def without_predicted_times(text: str) -> str:
    """The text with each predicted time's number left out."""
    return re.sub(r"[\d.e+]+ us (on the device|to launch)", r"\1", text)
