"""What reports and pictures share: the facts of their machine, an HTML page, the look of plots."""
