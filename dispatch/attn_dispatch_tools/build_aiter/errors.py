"""What stops a build."""


class BuildError(Exception):
    """A build cannot go on; the message is a sentence that says what to do."""
