"""What all commands share on a terminal: help, line lengths, colours, progress, and exit status."""
