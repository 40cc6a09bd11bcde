"""`python -m examples.smollm2`."""

import sys

try:
    from .main import main
except ModuleNotFoundError as error:
    if error.name not in ("gguf", "rich", "tokenizers"):
        raise
    sys.exit(
        f"error: the package {error.name} is missing: "
        "run `pip install -r examples/smollm2/requirements.txt`."
    )

main()
