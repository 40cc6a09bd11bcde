"""`attn-dispatch build-aiter`: builds AITER's libraries from the sources in the amd-aiter wheel.

wheel.py finds the sources, and toolchain.py a compiler (debian.py if ROCm is missing). generate.py
writes the C++ files, ninja.py compiles and links them, and install.py copies the result into place.
"""
