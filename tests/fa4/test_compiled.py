"""Loading the compiled kernels of FlashAttention-4, and the choice of a set for a call.

Loading what is no such library is tried in new processes, as a process uses the first that loads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attn_dispatch.devices import native_libraries
from attn_dispatch.fa4 import compiled, folder
from attn_dispatch.fa4.compiled import CompiledLibrary, KernelSet
from attn_dispatch_tools.build_fa4 import environment
from attn_dispatch_tools.build_fa4.sets import SETS
from tests.support import fa4_stand_in
from tests.support.fa4_emulated import Emulated, emulated
from tests.support.fake_aiter import shared_library
from tests.support.repository import environment as child_environment


@pytest.fixture(scope="module")
def fa4() -> Emulated:
    return emulated()


_BY_NAME = SETS | {x.name: x for x in fa4_stand_in.sets()}


def _set(name: str) -> KernelSet:
    x = _BY_NAME[name]
    forward, backward = x.forward, x.backward
    return KernelSet(
        name, x.arch, x.dtype, x.head_dim, x.head_dim_v, forward.tile_m, forward.tile_n,
        backward.tile_m, backward.tile_n, backward.subtiles, "key_value_grad" in x.kernels,
        "forward_sinks" in x.kernels,
        *(("",) * 3 if x.variant is None else (x.variant.digest, x.variant.name, x.variant.types)),
        *x.tangent_tiles, x.is_wide,
    )  # fmt: skip


BOTH = CompiledLibrary(None, sets=tuple(map(_set, SETS)))
ALL = BOTH.on("sm90")


def test_the_library_says_what_build_fa4_put_in(fa4):
    assert fa4.library.versions == environment.versions(has_wide=True)
    assert fa4.library.sets == tuple(_set(x.name) for x in fa4.library.sets)


@pytest.mark.parametrize(
    ("dims", "has_grouped_gradients", "name"),
    [
        ((64, 64), True, "sm90_d64_bfloat16"),
        ((8, 8), True, "sm90_d64_bfloat16"),
        ((65, 64), True, "sm90_d96_bfloat16"),
        ((128, 128), True, "sm90_d128_bfloat16"),
        ((192, 128), False, "sm90_d192_128_bfloat16"),
        ((192, 128), True, "sm90_d192_bfloat16"),
        ((130, 64), False, "sm90_d192_128_bfloat16"),
        ((128, 192), False, "sm90_d192_bfloat16"),
        ((193, 1), False, "sm90_d256_bfloat16"),
        ((256, 256), True, "sm90_d256_bfloat16"),
        ((257, 64), False, None),
        ((64, 257), False, None),
    ],
)
def test_a_call_gets_the_narrowest_set_that_its_columns_fit(dims, has_grouped_gradients, name):
    found = ALL.set_for(*dims, "bfloat16", has_grouped_gradients=has_grouped_gradients)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("dims", "name"),
    [((64, 64), "sm100_d64_bfloat16"), ((65, 128), "sm100_d128_bfloat16"), ((129, 64), None)],
)
def test_a_call_on_another_architecture_gets_a_set_for_that(dims, name):
    found = BOTH.on("sm100").set_for(*dims, "bfloat16")
    assert (found and found.name) == name
    assert BOTH.on("sm120").sets == ()


def test_the_command_for_one_more_architecture_keeps_the_others():
    assert compiled.build_command("sm100") == "`attn-dispatch build-fa4 --add --arch sm100`"


def test_no_set_is_for_another_dtype():
    found = ALL.set_for(64, 64, "float16")
    assert found and found.name == "sm90_d64_float16"
    assert ALL.set_for(64, 64, "float32") is None


def test_tiles_of_a_list_may_hold_several_of_the_kernels():
    kernels = _set("sm90_d128_bfloat16")
    assert (kernels.forward_tiles, kernels.backward_tiles) == ((128, 128), (128, 128))
    assert (kernels.backward_tile_m, kernels.backward_subtiles) == (64, 2)


def test_names_for_messages():
    sets = [_set("sm90_d64_float16"), _set("sm90_d192_128_bfloat16")]
    assert compiled.names(sets) == "head dims 64 in float16; head dims 192/128 in bfloat16"


# Libraries that cannot be used.


def test_without_a_file_the_reason_is_how_to_build_it(fa4, tmp_path):
    path = tmp_path / folder.LIBRARY
    library = compiled.load(fa4.module, path)
    assert not library.is_usable and library.sets == ()
    assert library.unusable_reason == (
        "FlashAttention-4's kernels are not compiled: run `attn-dispatch build-fa4` (there is no "
        f"file {path})"
    )


@pytest.mark.parametrize(
    ("make", "kind"), [(os.mkdir, "a folder"), (os.mkfifo, "a pipe or device")]
)
def test_what_is_no_file_is_not_opened(fa4, tmp_path, make, kind: str):
    path = tmp_path / folder.LIBRARY
    make(path)
    library = compiled.load(fa4.module, path)
    assert not library.is_usable and library.sets == ()
    assert library.unusable_reason == (
        f"FlashAttention-4's kernels: expected the name of a file, got {path}, {kind}"
    )


def test_without_our_library_the_reason_is_its_own(monkeypatch):
    def fail(name: str):
        raise ImportError("built without CUDA")

    monkeypatch.setattr(native_libraries, "load", fail)
    compiled._load.cache_clear()
    assert compiled.find().unusable_reason == "built without CUDA"
    compiled.register.cache_clear()
    with pytest.raises(RuntimeError, match="built without CUDA"):
        compiled.register()


def test_a_failure_is_not_remembered_but_a_success_is(fa4, monkeypatch, tmp_path):
    monkeypatch.setattr(native_libraries, "load", lambda name: fa4.module)
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "none.so"))
    compiled._load.cache_clear()
    try:
        assert not compiled.find().is_usable
        monkeypatch.setenv(folder.VARIABLE, fa4.library.path)
        assert compiled.find().sets == fa4.library.sets
        monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "none.so"))
        assert compiled.find().is_usable
    finally:
        compiled._load.cache_clear()


def test_only_what_a_wheel_brought_may_be_another_users(monkeypatch, tmp_path):
    """What the environment or the user's folder has is judged; `_cuda` beside a wheel's is not."""
    (path := tmp_path / folder.LIBRARY).write_bytes(shared_library())
    path.chmod(0o666)
    facts = {"path": str(path), "versions": "", "sets": []}
    backend: Any = SimpleNamespace(load_fa4=lambda path: facts)
    assert "can be written by other users" in compiled.load(backend, path).unusable_reason
    monkeypatch.setattr(folder, "_in_package", lambda: (path,))
    assert compiled.load(backend, path).is_usable


def _library(path: Path, source: str) -> Path:
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def _reason(path: Path) -> str:
    """Why a new process cannot load this file, with whichever of our modules it has."""
    code = (
        "import sys; from pathlib import Path; from attn_dispatch.fa4 import compiled;"
        "from tests.support import fa4_emulated;"
        "print(compiled.load(fa4_emulated.module(), Path(sys.argv[1])).unusable_reason)"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=child_environment(), timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


_AGAIN = "; build it again with `attn-dispatch build-fa4`"


def test_a_library_of_something_else_is_refused(tmp_path):
    path = _library(tmp_path / "other.so", "int something;")
    assert _reason(path) == f"{path} has no FlashAttention-4 kernels{_AGAIN}"


def test_a_library_of_another_interface_is_refused_before_anything_else_is_read(tmp_path):
    source = "static const int it = 77; const int* attn_dispatch_fa4_library(void) { return &it; }"
    path = _library(tmp_path / "newer.so", source)
    assert _reason(path) == f"{path} has another interface: expected 6, got 77{_AGAIN}"


@pytest.mark.parametrize("kind", ["text", "cut off", "symbol"])
def test_a_library_that_cannot_be_loaded_is_refused(tmp_path, kind: str):
    path = tmp_path / "broken.so"
    if kind == "text":
        path.write_text("no library")
    elif kind == "symbol":
        _library(path, "int nowhere(void); int (*use)(void) = nowhere;")
    else:
        whole = _library(path, "char much[1000000] = {1};").read_bytes()
        path.write_bytes(whole[:5000])
    reason = _reason(path)
    assert str(path) in reason and reason.endswith(_AGAIN) and reason.count(_AGAIN) == 1
