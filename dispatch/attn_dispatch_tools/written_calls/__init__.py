"""Calls as users write them down: a line of text, a JSON file, options of a command."""
