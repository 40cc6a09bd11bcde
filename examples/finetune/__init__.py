"""Fine-tune SmolLM2 on Python's manual, packed: see README.md."""
