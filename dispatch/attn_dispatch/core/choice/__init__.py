"""Which implementation comes first: measured times of this very call, else a model of time."""
