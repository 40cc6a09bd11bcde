"""`python -m attn_dispatch` is the `attn-dispatch` command."""

from attn_dispatch.cli import main

if __name__ == "__main__":
    main()
