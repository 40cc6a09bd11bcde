"""Finding cuDNN: the choice among several, and the reason if one cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch_tools import cli
from tests.support.backend import needs_cudnn, needs_no_driver
from tests.support.compiled import library, needs_compiler
from tests.support.part_of_cudnn import part_of_cudnn

SONAME = "libcudnn.so.9"
VERSION = 'extern "C" unsigned long cudnnGetVersion() {{ return {}; }}'


@pytest.fixture
def fresh_search() -> Iterator[None]:
    """The test, and the tests after it, search for cuDNN again."""
    cudnn_library._load.cache_clear()
    cudnn_library._planning_process.cache_clear()
    yield
    cudnn_library._load.cache_clear()
    cudnn_library._planning_process.cache_clear()


def fake_cudnn(path: Path, version: int) -> Path:
    """A folder with a library that reports this version of cuDNN."""
    path.mkdir()
    library(path / SONAME, VERSION.format(version))
    library(path / "libcudnn_graph.so.9", "")
    return path


@needs_no_driver
@needs_cudnn
def test_missing_library_is_searched_for_again(fresh_search, monkeypatch, tmp_path):
    path = tmp_path / SONAME
    real = cudnn_library._locate()
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", str(path))
    for _ in range(2):
        missing = cudnn_library.find()
        assert not missing.is_usable and missing.path == str(path)
        assert missing.unusable_reason.startswith(f"cuDNN could not be loaded: {path}: cannot open")
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", real)  # as if it were installed now
    found = cudnn_library.find()
    assert found.is_usable and found.path == real
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", str(path))
    assert cudnn_library.find() is found  # a found library is kept


@needs_no_driver
@needs_cudnn
def test_missing_cudnn_has_a_command_that_installs_it(fresh_search, monkeypatch):
    monkeypatch.setattr(cudnn_library, "_locate", lambda: "libcudnn.so.9")
    missing = cudnn_library.find().missing
    assert missing and missing.what == "cuDNN is not installed"
    assert missing.install == "pip install --no-deps nvidia-cudnn-cu13"


@needs_no_driver
@needs_cudnn
@needs_compiler
@pytest.mark.parametrize("version", [90100, 91199, 100000])
def test_version_out_of_range_is_refused(fresh_search, monkeypatch, tmp_path, version):
    """The refused library does not prevent the use of another one of the same name."""
    real = cudnn_library._locate()
    wrong = fake_cudnn(tmp_path / "wrong", version) / SONAME
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", str(wrong))
    assert cudnn_library.find().unusable_reason == (
        f"cuDNN {version} at {wrong} is out of range: expected at least 91200 and below 100000"
    )
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", real)
    assert cudnn_library.find().path == real


@needs_no_driver
@needs_cudnn
@needs_compiler
def test_search_order(fresh_search, monkeypatch, tmp_path, capsys):
    """The named library first, then the first in LD_LIBRARY_PATH, then the wheel's."""
    wheel = cudnn_library._locate()
    first, second = fake_cudnn(tmp_path / "a", 92001), fake_cudnn(tmp_path / "b", 92102)

    def found() -> str:
        cudnn_library._load.cache_clear()
        cudnn_library._planning_process.cache_clear()
        library = cudnn_library.find()
        cli.main(["info"])
        lines = capsys.readouterr().out.splitlines()
        (number,) = (i for i, x in enumerate(lines) if x.startswith("  cuDNN"))
        assert lines[number].startswith(f"  cuDNN {library.version_text}, ")
        assert f"[{library.path}]" in "".join(x.strip() for x in lines[number : number + 4])
        return library.path

    monkeypatch.delenv("ATTN_DISPATCH_CUDNN", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{first}:{second}")
    assert found() == str(first / SONAME)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{second};{first}")
    assert found() == str(second / SONAME)
    monkeypatch.chdir(first)
    for folders in ("../b", f":{second}", "."):  # relative folders and the current one
        monkeypatch.setenv("LD_LIBRARY_PATH", folders)
        assert found() == str((second if folders == "../b" else first) / SONAME)
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / SONAME)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/pipes:{second}")
    assert found() == str(second / SONAME)
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", str(first / SONAME))
    assert found() == str(first / SONAME)
    monkeypatch.delenv("ATTN_DISPATCH_CUDNN")
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert found() == wheel


@needs_compiler
def test_loaded_library_comes_before_the_path(tmp_path):
    """The test runs in a separate process, because a loaded library stays loaded."""
    first, second = fake_cudnn(tmp_path / "a", 92001), fake_cudnn(tmp_path / "b", 92102)
    code = f"""
import ctypes
from attn_dispatch.cudnn import library
ctypes.CDLL({str(second / SONAME)!r})
print(library._locate())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env=os.environ | {"LD_LIBRARY_PATH": str(first), "ATTN_DISPATCH_CUDNN": ""},
    )  # fmt: skip
    assert done.stdout == f"{second / SONAME}\n", done.stderr


@needs_no_driver
@needs_cudnn
@pytest.mark.parametrize(
    "part, is_named",
    [("", True), ("_graph", True), ("_engines_runtime_compiled", True), ("_ops", True),
     ("_graph", False)],
)  # fmt: skip
def test_a_cudnn_with_a_truncated_part_is_refused(
    fresh_search, monkeypatch, tmp_path, part, is_named
):
    """Reading past the end of the file would end the planning process with SIGBUS."""
    real = cudnn_library._locate()
    # The folder's name has characters that a glob pattern would interpret.
    cudnn = part_of_cudnn(tmp_path / "[cudnn]*", real)
    cut = cudnn.parent / f"libcudnn{part}.so.9"
    with cut.open("rb") as whole:
        start = whole.read(bytes_kept := cut.stat().st_size // 2)
    cut.unlink()
    cut.write_bytes(start)
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", str(cudnn))
    if not is_named:  # the loader finds it
        monkeypatch.setenv("ATTN_DISPATCH_CUDNN", "")
        monkeypatch.setenv("LD_LIBRARY_PATH", str(cudnn.parent))
        monkeypatch.setattr(cudnn_library, "_locate", lambda: SONAME)
    reason = cudnn_library.find().unusable_reason
    assert reason.startswith(f"cuDNN could not be loaded: {cut} is cut off: it has {bytes_kept} by")
    monkeypatch.undo()
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", real)
    assert cudnn_library.find().is_usable


@needs_no_driver
@needs_cudnn
@pytest.mark.parametrize("part", ["", "_ops"])
def test_a_pipe_in_place_of_a_library_is_refused(fresh_search, monkeypatch, tmp_path, part):
    """The loader would wait forever for a process to write to the pipe."""
    cudnn = part_of_cudnn(tmp_path / "cudnn", cudnn_library._locate())
    pipe = cudnn.parent / f"libcudnn{part}.so.9"
    pipe.unlink()
    os.mkfifo(pipe)
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", str(cudnn))
    reason = cudnn_library.find().unusable_reason
    assert reason == f"cuDNN could not be loaded: {pipe} is not a file"


@needs_cudnn
def test_another_users_cudnn_is_not_loaded_by_name(fresh_search, monkeypatch, tmp_path):
    real = Path(cudnn_library._locate())
    cudnn = tmp_path / SONAME
    cudnn.write_bytes(real.read_bytes())
    cudnn.chmod(0o666)
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", str(cudnn))
    assert f"{cudnn} can be written by other users" in cudnn_library.find().unusable_reason


ODD_FOLDERS = [
    b"with space",
    b"not UTF-8 \xff",
    b"two\nlines",
    rb"back\\012slash",
    b"x (deleted)",
]


@needs_compiler
@pytest.mark.parametrize("name", ODD_FOLDERS, ids=repr)
def test_loaded_library_is_found_in_oddly_named_folders(tmp_path, name):
    inside = tmp_path / os.fsdecode(name)
    library(inside_file := fake_cudnn(tmp_path / "plain", 92001) / SONAME, VERSION.format(92001))
    inside.mkdir()
    inside_file.rename(inside / SONAME)
    code = """
import ctypes, os, sys
from attn_dispatch.cudnn import library
ctypes.CDLL(sys.argv[1])
print(os.fsencode(library._loaded_already()))
os.unlink(sys.argv[1])
print(library._loaded_already())
"""
    command = [sys.executable, "-c", code, str(inside / SONAME)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = repr(os.fsencode(inside / SONAME))
    assert done.stdout == f"{found}\n{SONAME}\n", done.stderr


OTHER_FILES = (b"libcudnn.so.9.txt", b"my libcudnn.so.9", b"libcudnn.so.9\xff", b"\xff", b"a\nb")


def test_other_mapped_files_are_not_mistaken_for_cudnn(tmp_path):
    """Files with similar or undecodable names, in a folder that is named like the library."""
    (tmp_path / SONAME).mkdir()
    for name in OTHER_FILES:
        (tmp_path / SONAME / os.fsdecode(name)).write_bytes(b"data")
    code = """
import mmap, pathlib, sys
from attn_dispatch.cudnn import library
files = [open(x, "rb") for x in pathlib.Path(sys.argv[1]).iterdir()]
maps = [mmap.mmap(x.fileno(), 0, prot=mmap.PROT_READ) for x in files]
print(len(maps), repr(library._loaded_already()))
"""
    command = [sys.executable, "-c", code, str(tmp_path / SONAME)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{len(OTHER_FILES)} ''\n", done.stderr


@needs_cudnn
def test_folder_whose_name_is_not_utf8_works(fresh_search, monkeypatch, tmp_path):
    """The name reaches the planning process and comes back, also in the message about a missing
    library."""
    real = Path(cudnn_library._locate())
    inside = tmp_path / os.fsdecode(b"\xff")
    monkeypatch.setenv("ATTN_DISPATCH_CUDNN", str(inside / SONAME))
    if cudnn_library.find().can_run:
        pytest.skip("with a driver cuDNN is loaded in this process, for good")
    assert "\udcff" in cudnn_library.find().unusable_reason
    inside.symlink_to(real.parent)
    assert cudnn_library.find().path == str(inside / SONAME)
