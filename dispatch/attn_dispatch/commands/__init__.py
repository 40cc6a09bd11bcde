"""Commands that are nobody else's: info, explain, mask, completion."""
