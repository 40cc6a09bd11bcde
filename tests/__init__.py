"""Tests, and what they share: `tests.support`. Only the checkout has them, no wheel does."""
