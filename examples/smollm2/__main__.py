"""`python -m examples.smollm2`."""

import sys

from attn_dispatch_tools.terminal.ending import run_process

try:
    from .main import main
except ModuleNotFoundError as error:
    if error.name not in ("gguf", "rich", "tokenizers"):
        raise
    sys.exit(
        f"error: the package {error.name} is missing: "
        "run `pip install -r examples/smollm2/requirements.txt`."
    )

run_process(main)
