"""`attn-dispatch build-aiter`: AITER's libraries from the amd-aiter wheel's sources.

wheel.py finds the sources, toolchain.py a compiler (debian.py where ROCm is missing), generate.py
writes the C++ files, ninja.py compiles and links them, install.py puts the result in its folder.
"""
