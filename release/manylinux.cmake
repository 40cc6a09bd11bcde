# Compile on any Linux for the glibc that jaxlib's wheels need (manylinux_2_27). zig brings clang, the
# symbols of that glibc, and a C++ library, which is linked statically.
set(zig $ENV{ATTN_RELEASE_ZIG})
set(target -target x86_64-linux-gnu.2.27 -fno-sanitize=undefined)  # zig's default is to sanitize
list(APPEND target -idirafter $ENV{ATTN_RELEASE_MULTIARCH})
set(CMAKE_C_COMPILER ${zig} cc ${target})
set(CMAKE_CXX_COMPILER ${zig} c++ ${target})
foreach(kind MODULE SHARED)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT -s)
endforeach()
