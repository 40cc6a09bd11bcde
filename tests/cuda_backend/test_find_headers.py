"""Where a build of the CUDA library finds headers, and what it fetches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.headers import SCRIPT, find_headers

PLACES = {
    "nvidia-cudnn-frontend": ["include/cudnn_frontend.h"],
    "nvidia-cudnn-cu13": ["nvidia/cudnn/include/cudnn.h", "nvidia/cudnn/lib/libcudnn.so.9"],
    "nvidia-cuda-runtime": ["nvidia/cu13/include/cuda.h", "nvidia/cu13/include/cuda_runtime_api.h"],
    "nvidia-cuda-crt": ["nvidia/cu13/include/crt/host_defines.h"],
    "nvidia-cuda-cccl": ["nvidia/cu13/include/cccl/nv/target"],
    "nvidia-cuda-nvrtc": ["nvidia/cu13/include/nvrtc.h", "nvidia/cu13/lib/libnvrtc.so.13"],
    "jaxlib": ["jaxlib/include/xla/ffi/api/ffi.h", "jaxlib/libjax_common.so"],
}
PIP = f"""
import re, sys
from pathlib import Path

Path(__file__).with_name("arguments").open("a").write(" ".join(sys.argv[1:]) + "\\n")
target = Path(sys.argv[sys.argv.index("--target") + 1])
for requirement in sys.argv[sys.argv.index("--target") + 2:]:
    name = re.split("[<>=]", requirement)[0]
    if name == Path(__file__).with_name("refused").read_text():
        sys.exit(1)
    info = target / f"{{name.replace('-', '_')}}-99.0.dist-info"
    info.mkdir(parents=True)
    files = {PLACES!r}[name]
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {{name}}\\nVersion: 99.0\\n")
    (info / "RECORD").write_text("".join(f"{{file}},,\\n" for file in files))
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).touch()
"""


@pytest.fixture
def find(tmp_path):
    """Runs the script with no packages but a pip that makes empty headers."""
    pip = tmp_path / "path" / "pip"
    pip.mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "__main__.py": PIP,
        "arguments": "",
        "refused": "",
    }.items():
        (pip / name).write_text(text)

    def run(
        refused: str = "",
    ) -> tuple[list[str], list[list[str]], subprocess.CompletedProcess[str]]:
        (pip / "refused").write_text(refused)
        environment = {x: y for x, y in os.environ.items() if x != "ATTN_DISPATCH_INCLUDE"}
        done = subprocess.run(
            [sys.executable, "-S", SCRIPT, "--fetch", tmp_path / "headers"],
            capture_output=True, text=True, env=environment | {"PYTHONPATH": str(pip.parent)},
        )  # fmt: skip
        calls = [line.split() for line in (pip / "arguments").read_text().splitlines()]
        return done.stdout.splitlines(), calls, done

    return run


def test_pip_fetches_wheels_of_headers_alone(find, tmp_path):
    folders, (call,), _ = find()
    assert "--no-deps" in call and "nvidia-cudnn-frontend>=1.28,<1.30" in call
    assert "jaxlib==0.10.2" in call, "the oldest FFI"
    names = ["cudnn_frontend.h", "cuda.h", "crt/host_defines.h", "nv/target", "xla/ffi/api/ffi.h"]
    for name in names:
        assert any(Path(folder, name).exists() for folder in folders), name
    assert not list((tmp_path / "headers").rglob("*.so*")), "libraries are not kept"
    assert find()[:2] == (folders, [call]), "they are not fetched twice"


def test_headers_that_cannot_be_fetched_are_an_error(find):
    folders, _, done = find("nvidia-cuda-nvrtc")
    assert done.returncode == 1 and folders == []
    assert "pip could not fetch the headers: nvidia-cudnn-frontend" in done.stderr
    assert find()[2].returncode == 0, "an unfinished folder is not used"


@pytest.mark.parametrize(("version", "is_used"), [("9.12.0.46", False), ("9.28.1.4", True)])
def test_headers_of_a_new_cudnn_in_the_environment_are_used(
    tmp_path, monkeypatch, version: str, is_used: bool
):
    info = tmp_path / f"nvidia_cudnn_cu13-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: nvidia-cudnn-cu13\nVersion: {version}\n"
    )
    (info / "RECORD").write_text("nvidia/cudnn/include/cudnn.h,,\n")
    folder = tmp_path / "nvidia" / "cudnn" / "include"
    folder.mkdir(parents=True)
    (folder / "cudnn.h").touch()
    module = find_headers()
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    (cudnn,) = (x for x in module.WANTED if x.file == "cudnn.h")
    assert module.in_environment(cudnn) == (str(folder) if is_used else None)
