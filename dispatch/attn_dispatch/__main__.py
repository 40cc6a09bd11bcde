"""`python -m attn_dispatch` is the `attn-dispatch` command.

The one file of this package that imports attn_dispatch_tools: nothing imports it.
"""

from attn_dispatch_tools.cli import main

if __name__ == "__main__":
    main()
