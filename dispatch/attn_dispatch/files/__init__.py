"""Files that others may have made: read, written and locked within limits."""
