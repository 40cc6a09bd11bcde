"""The exception that stops a build."""


class BuildError(Exception):
    """A build cannot continue. The message says why and what to do."""
