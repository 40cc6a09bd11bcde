"""Real builds of FlashAttention-4's kernels, which need no GPU: two sets, and a wheel with all.

The compiler's download is 325 MB, and the builds take some minutes. They run if
ATTN_DISPATCH_TEST_BUILD_FA4 names a folder, in which both stay for the next time.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from attn_dispatch.fa4 import compiled
from attn_dispatch_tools.build_fa4 import command, environment
from attn_dispatch_tools.build_fa4.sets import SETS
from tests.support import fa4_emulated
from tests.support.repository import ROOT

pytestmark = pytest.mark.skipif(
    not os.environ.get("ATTN_DISPATCH_TEST_BUILD_FA4"),
    reason="takes minutes; set ATTN_DISPATCH_TEST_BUILD_FA4 to a folder to build in",
)

_PLAIN = [SETS["sm90_d64_bfloat16"], SETS["sm90_d192_128_float16"]]
_MODS = ["attn_dispatch.mods:soft_cap(50)", "tests.support.score_mods:by_head_and_place"]
_CHOSEN = [*_PLAIN, *command.with_mods(_PLAIN[:1], _MODS)[1:]]
_NEEDED = r"(libc|libm|libdl|ld-linux-x86-64)\.so"
_EM_CUDA = 190


@pytest.fixture(scope="module")
def folder():
    """The folder to build in, in which the cache is as well."""
    folder = Path(os.environ["ATTN_DISPATCH_TEST_BUILD_FA4"]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def library(folder):
    path = folder / command.fa4_folder.LIBRARY
    command.build(path, _CHOSEN, command.default_jobs())
    return path


@pytest.fixture(scope="module")
def wheel(folder):
    """The wheel of `ATTN_DISPATCH_CUDA=1 ATTN_DISPATCH_FA4=1 pip wheel .`."""
    variables = {"ATTN_DISPATCH_CUDA": "1", "ATTN_DISPATCH_FA4": "1"}
    oldest = Path(sys.prefix, "oldest-jaxlib", "jaxlib", "include")
    if oldest.exists():
        variables["ATTN_DISPATCH_INCLUDE"] = str(oldest)
    with tempfile.TemporaryDirectory(dir=folder) as built:
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", built]
        command = [*pip, "--config-settings", f"build-dir={folder / 'wheel'}", str(ROOT)]
        environment = os.environ | variables
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        (path,) = Path(built).glob("*.whl")
        with zipfile.ZipFile(path) as opened:
            yield opened


def _output(*arguments: str) -> str:
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


def test_it_exports_one_function_and_needs_only_libc(library):
    exported = _output("nm", "-D", "--defined-only", "--format=just-symbols", str(library)).split()
    assert exported == ["attn_dispatch_fa4_library"]
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-dW", str(library)))
    assert [x for x in needed if not re.match(_NEEDED, x)] == []


def test_host_code_runs_on_any_x86_64(library):
    """By default, the compiler uses whatever the CPU of the building machine has."""
    code = _output("objdump", "-d", "--no-show-raw-insn", str(library))
    assert len(code.splitlines()) > 1000
    assert re.findall(r"%[yz]mm\d+", code) == []


def test_device_code_is_for_sm90_and_runs_with_cuda_12(library):
    """ABI 8, which the compiler's flavour for CUDA 13 writes, is refused by drivers of CUDA 12."""
    cubins = _cubins(library)
    assert len(cubins) == sum(len(x.kernels) for x in _CHOSEN)
    assert {x[8] for x in cubins} == {7}
    flags = {struct.unpack_from("<I", x, 48)[0] & 0xFF for x in cubins}
    assert flags == {90}


def _cubins(library: Path) -> list[bytes]:
    """The ELF headers of the device code in a library."""
    whole = library.read_bytes()
    places = [x.start() for x in re.finditer(rb"\x7fELF\x02\x01", whole)]
    headers = [whole[x : x + 64] for x in places]
    return [x for x in headers if struct.unpack_from("<H", x, 18)[0] == _EM_CUDA]


def test_device_code_for_sm100_is_of_the_abi_of_cuda_12_9(folder, library):
    """CUDA 12.9's compiler, which made the code, writes no older ABI for sm100."""
    for_sm100 = folder / "sm100.so"
    chosen = command.chosen(["sm100_d128_bfloat16"], ["sm100"])
    command.build(for_sm100, chosen, command.default_jobs())
    assert _undefined(for_sm100) == _undefined(library)
    cubins = _cubins(for_sm100)
    assert len(cubins) == len(chosen[0].kernels)
    assert {x[8] for x in cubins} == {8}
    assert {struct.unpack_from("<I", x, 48)[0] >> 8 & 0xFF for x in cubins} == {100}
    assert b"Cuda compilation tools, release 12.9" in for_sm100.read_bytes()


def _undefined(library: Path) -> list[str]:
    names = _output("nm", "-D", "--undefined-only", "--format=just-symbols", str(library)).split()
    return sorted(names)


def test_a_wheel_has_all_kernels_and_the_licences_of_their_sources(wheel, tmp_path):
    names = wheel.namelist()
    inside = f"attn_dispatch/{command.fa4_folder.LIBRARY}"
    assert inside in names
    assert [x for x in names if re.match(r"attn_dispatch/_cuda\..*so", x)]
    licences = sorted(x.partition("/licenses/")[2] for x in names if "/licenses/" in x)
    of_sources = ("LICENSE", "LICENSE.flash-attention", "LICENSE.quack")
    of_wide = (f"{x}/LICENSE" for x in ("ffpa-attn", "quack-kernels"))
    assert licences == ["LICENSE", *(f"fa4-jax/{x}" for x in of_sources), *of_wide]
    library = Path(wheel.extract(inside, tmp_path))
    symbols = _output("strings", "-n", "8", str(library)).split()
    assert {x for x in SETS if x.startswith("sm90_")} <= {*symbols}


def test_the_handlers_load_it(library):
    found = compiled.load(fa4_emulated.module(), library)
    assert found.versions == environment.versions()
    assert [x.name for x in found.sets] == [x.name for x in _CHOSEN]
