"""Fitting the rates of core/choice to measured times."""
