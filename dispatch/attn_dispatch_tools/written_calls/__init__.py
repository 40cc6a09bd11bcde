"""Reading calls as users write them: as a line of text, a JSON file or options of a command."""
