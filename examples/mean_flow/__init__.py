"""A transformer trained by MeanFlow, whose loss has a forward-mode derivative: see README.md."""
