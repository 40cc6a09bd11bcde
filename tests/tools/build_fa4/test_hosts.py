"""Kernels for other machines: a real set compiled for each host, and its host code run.

On request, as test_build_for_real.py. The host code runs on a driver that prints launches; that of
another host needs a C compiler for it (Debian: gcc-aarch64-linux-gnu) and qemu-user.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from attn_dispatch.fa4 import folder as fa4_folder
from attn_dispatch_tools.build_fa4 import compiling, environment, linking
from attn_dispatch_tools.build_fa4.hosts import HOSTS, Host
from attn_dispatch_tools.build_fa4.sets import SETS, KernelSet

pytestmark = pytest.mark.skipif(
    not os.environ.get("ATTN_DISPATCH_TEST_BUILD_FA4"),
    reason="takes minutes; set ATTN_DISPATCH_TEST_BUILD_FA4 to a folder to build in",
)

SOURCE = Path(__file__).with_name("launches.c")
HOPPER, BLACKWELL = SETS["sm90_d64_bfloat16"], SETS["sm100_d64_bfloat16"]
_MACHINES = {"x86-64": 62, "aarch64": 183}
"""Numbers of ELF."""

_REST = """\
preprocess load 0 prepare 0 grid 3 4 2 block 256 1 1 result 0
query_grad load 0 prepare 0 grid 3 4 2 block {} 1 1 result 0
"""
_FORWARD = "load 0 prepare 0 grid {} block 512 1 1 result 0"
LAUNCHES = {
    "sm90": "\n".join(
        [*(f"{x} {_FORWARD.format('16 1 1')}" for x in ("forward", "forward_sinks")), _REST]
    ),
    "sm100": f"forward {_FORWARD.format('2 4 2')}\n{_REST}",
}
"""Two batch rows with 4 heads of 300 queries, in tiles of 192 or 256, and of 128."""

CASES = [
    (host, kernels, threads)
    for host in HOSTS.values()
    for kernels, threads in ((HOPPER, 256), (BLACKWELL, 128))
]
"""The threads are those of the last kernel."""


@pytest.fixture(scope="module")
def cache():
    folder = Path(os.environ["ATTN_DISPATCH_TEST_BUILD_FA4"]).resolve()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield fa4_folder.cache()


def _compiled(cache: Path, kernels: KernelSet, host: Host) -> compiling.Compiled:
    found = compiling.kept(cache, kernels, host)
    if not found.is_complete:
        compiling.compile_all([found], environment.made(cache), 1, lambda name: None)
    return found


@pytest.mark.parametrize("name", HOSTS)
def test_objects_are_for_the_host(cache, name: str):
    for path in _compiled(cache, HOPPER, HOSTS[name]).objects:
        header = path.read_bytes()[:20]
        assert header[:5] == b"\x7fELF\x02"
        assert struct.unpack_from("<H", header, 18) == (_MACHINES[name],)


@pytest.mark.parametrize(
    ("host", "kernels", "threads"), CASES, ids=lambda x: getattr(x, "name", "")
)
def test_host_code_of_the_library_launches_the_kernels(
    cache, tmp_path, host: Host, kernels: KernelSet, threads: int
):
    runner = []
    if not host.is_this_machine:
        triple = host.cross_compiler.removesuffix("-gcc")
        emulator = shutil.which(f"qemu-{triple.partition('-')[0]}")
        if not (emulator and shutil.which(host.cross_compiler)):
            pytest.skip(f"needs {host.cross_compiler} and qemu-user")
        runner = [emulator, "-L", f"/usr/{triple}"]
    library = tmp_path / fa4_folder.LIBRARY
    linking.link([_compiled(cache, kernels, host)], library)
    program = tmp_path / "launches"
    include = f"-I{linking.SOURCE.parent}"
    command = [host.compiler(), "-Wall", "-Werror", include, SOURCE, library, "-o", program]
    subprocess.run([*command, f"-Wl,-rpath,{tmp_path}"], check=True)
    done = subprocess.run([*runner, program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, launches = done.stdout.split("\n", 1)
    assert first.endswith(f" {environment.versions()} {kernels.name}")
    assert launches == LAUNCHES[kernels.arch].format(threads)
