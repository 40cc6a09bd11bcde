"""What can be done for calls before they are made: the commands `plan` and `tune`."""
