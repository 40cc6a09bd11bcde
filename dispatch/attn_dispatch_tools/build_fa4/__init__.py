"""`attn-dispatch build-fa4`: compiles FlashAttention-4's kernels, on a machine without a GPU too.

environment.py installs the kernels' sources and their compiler apart from this Python's packages.
compiling.py runs export_kernels.py there, once for each set of kernels (sets.py), and keeps what
was compiled. linking.py makes the library, whose own code is fa4_library.c.
"""
