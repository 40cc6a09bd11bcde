"""Fresh virtual environments, and trials of what is installed in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from plugins import BUILD, DIST, VERSION, Plugin

_SMOKE = Path(__file__).with_name("smoke.py")


class Failed(Exception):
    """A command failed; the message has the end of its output."""


@dataclass(frozen=True)
class Environment:
    """A new virtual environment."""

    name: str

    @property
    def folder(self) -> Path:
        return BUILD / "environments" / self.name

    def create(self, python: Path, jax: str = "") -> None:
        """Make the environment, with `jax` if that is not empty, and without this project."""
        self.remove()
        run(python, "-m", "venv", self.folder)
        if jax:
            self.pip(jax)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: str | Path, env: dict[str, str] | None = None) -> str:
        options = ("--quiet", "--no-compile", "--disable-pip-version-check")
        return run(self.python, "-m", "pip", "install", *options, *arguments, env=env)

    def version(self, package: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        return run(self.python, "-c", code).strip()

    def has(self, package: str) -> bool:
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
        return subprocess.run([self.python, "-c", code]).returncode == 0

    def install(self, *names: str) -> None:
        """Install these packages from the wheels, without the gigabytes that only a GPU needs."""
        wanted = [f"{name}=={VERSION}" for name in names]
        self.pip("platformdirs", "numpy")
        self.pip("--no-index", "--no-deps", "--find-links", DIST, *wanted)

    def smoke(self, expected: str, cudnn: Path | None = None) -> str:
        """Run smoke.py in this environment's folder, and return what it printed."""
        env = {"PYTHONPATH": str(cudnn)} if cudnn else {}
        return run(self.python, _SMOKE, expected, env=env, cwd=self.folder).strip()

    def uninstall(self, name: str) -> None:
        run(self.python, "-m", "pip", "uninstall", "--quiet", "--yes", name)

    def resolve(self, plugin: Plugin, jax: str) -> int:
        """The number of packages that `pip install` of a plugin would install.

        uv resolves them without downloading them, some 2.5 GB.

        Raises:
          Failed: the requirements conflict.
        """
        wanted = f"{plugin.name}=={VERSION}\n{jax}\n"
        output = run(
            Path(sys.executable).with_name("uv"), "pip", "compile", "--quiet", "--no-header",
            "--no-annotate", "--find-links", DIST, "--python", self.python, "-", stdin=wanted,
        )  # fmt: skip
        return len(output.split())


def run(
    *command: str | Path,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> str:
    """Run a command with this text as its input, and return its stdout.

    Raises:
      Failed: the exit status is not 0.
    """
    ours = ("ATTN_DISPATCH_", "PYTHON", "VIRTUAL_ENV", "LD_")
    clean = {x: y for x, y in os.environ.items() if not x.startswith(ours)}
    done = subprocess.run(
        [str(x) for x in command], env=clean | {"JAX_PLATFORMS": "cpu"} | (env or {}), cwd=cwd,
        input=stdin, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Failed(f"{' '.join(map(str, command))}: " + "\n".join(lines[-12:]))
    return done.stdout


@lru_cache
def cudnn(major: int) -> Path:
    """A folder with only cuDNN for this version of CUDA, as NVIDIA's wheel installs it."""
    folder = BUILD / f"cudnn-cu{major}"
    if not folder.exists():
        unfinished = folder.with_suffix(".tmp")
        run(
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
            "--target", unfinished, f"nvidia-cudnn-cu{major}>=9.12,<10",
            # Older versions of cuDNN need NVRTC to plan.
            "nvidia-cuda-nvrtc" if major == 13 else f"nvidia-cuda-nvrtc-cu{major}",
        )  # fmt: skip
        unfinished.rename(folder)
    return folder
