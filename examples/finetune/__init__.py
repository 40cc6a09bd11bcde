"""SmolLM2 trained further on Python's own manual, packed: see README.md."""
