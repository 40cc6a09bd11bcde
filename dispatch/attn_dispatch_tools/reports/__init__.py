"""What the reports of `verify` and `bench` share: the environment, an HTML page, plot styles."""
