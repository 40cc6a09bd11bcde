"""`attn-dispatch build-aiter`: builds AITER's libraries from its sources.

wheel.py finds the sources, and toolchain.py a compiler (debian.py if ROCm is missing). generate.py
writes the C++ files, ninja.py compiles and links them, and install.py copies the result into place.

That is for the amd-aiter wheel on PyPI. For newer releases, checkout.py finds the sources, and
asm_build.py builds their ASM kernels alone, with the tables of asm_tables.py.
"""
