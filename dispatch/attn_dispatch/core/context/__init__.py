"""Context parallelism: calls whose rows and keys are spread over devices."""
