"""Reading, writing and locking files that other users or processes may have made."""
