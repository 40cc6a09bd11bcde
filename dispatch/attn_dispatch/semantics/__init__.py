"""What a call means, for every implementation: which pairs attend, which rows are padding."""
