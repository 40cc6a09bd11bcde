"""The tests and their shared helpers, `tests.support`. No wheel contains them."""
