"""What commands have in common on a terminal: help, lines that fit, looks, progress, how
they end."""
