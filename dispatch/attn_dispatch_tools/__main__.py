"""`python -m attn_dispatch_tools` is the `attn-dispatch` command."""

from attn_dispatch_tools.cli import main

if __name__ == "__main__":
    main()
