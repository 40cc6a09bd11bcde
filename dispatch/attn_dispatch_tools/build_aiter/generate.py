"""Writing the C++ files of a build with the generators in the wheel.

libmha_fwd.so also offers paged prefill, which attn_dispatch never calls, so it gets no kernels.
run_generator.py says what else is left out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from attn_dispatch_tools.build_aiter.wheel import Wheel
from attn_dispatch_tools.terminal.building import BuildError

# CK's name for the kernels of an architecture: gfx950 has separate ones, others share gfx9's.
_TARGETS = {"gfx942": "gfx9", "gfx950": "gfx950"}
_EVERYTHING = {"fwd": "*", "bwd": "*@*@*", "fwd_splitkv": "*@*"}
_NONE = "none"
"""A filter that matches no kernel."""
_NOTHING = {"batch_prefill": _NONE}

# Split-KV kernels that attend to parts of the keys, and kernels that combine their results. A
# combining kernel belongs to an attending one if these groups of both names are equal.
_COMBINES = re.compile(r"fmha_fwd_splitkv_combine_(d\d+_\w+?_batch)_.*_unused_ps(dv)?_")
_ATTENDS = re.compile(r"fmha_fwd_splitkv_(d\d+_\w+?_batch)_.*_vr_pssk(?:d(dv))?_")

_NAMES = (
    "names look like fmha_fwd_d128_bf16_batch_…, fmha_fwd_splitkv_d128_bf16_batch_… and "
    "fmha_bwd_d128_bf16_group_…"
)

# The kernels that run before and after ASM backward kernels, and that AITER's dispatch mentions.
_PRE_POST_FILTER = "*@*_ndeterministic@*_nbias*_dropout*_ndeterministic*"
_PRE_POST_GROUP = 8


@dataclass(frozen=True)
class Filters:
    """Which of CK's kernels to build, as fnmatch patterns for its generator."""

    forward: str = _EVERYTHING["fwd"]
    backward: str = _EVERYTHING["bwd"]
    """Three patterns, separated by @: for kernels before, after, and for the main ones."""
    split_kv: str = "*"
    """The pattern for forward kernels that split the keys. Kernels that combine their results are
    added."""
    must_match: tuple[str, ...] = ()
    """Patterns, of these three, that must match a kernel."""

    @classmethod
    def parse(
        cls,
        both: str | None,
        forward: str | None,
        backward: str | None,
        split_kv: str | None = None,
    ) -> Filters:
        """The filters for --filter, a part of a kernel's name, and the patterns that override it.

        Raises:
          BuildError: a filter has a comma.
        """
        for text in (both, forward, backward, split_kv):
            if text and "," in text:
                raise BuildError(f"a filter cannot hold a comma, got {text!r}")
        part = f"*{both}*" if both else "*"
        given = (x for x in (forward, backward, split_kv) if x and not x.endswith(_NONE))
        return cls(forward or part, backward or f"*@*@{part}", split_kv or part, tuple(given))


@dataclass(frozen=True)
class Sources:
    """The source files of one library, and the numbers of CK's kernels."""

    files: tuple[Path, ...]
    kernels: int
    """The number of CK's kernels among the files."""
    kernels_in_all: int
    """The number of CK's kernels without a filter."""


def generate(wheel: Wheel, arch: str, filters: Filters, folder: Path) -> tuple[Sources, Sources]:
    """Write the forward and the backward library's files into `folder`/forward and /backward.

    A file whose text is unchanged is not touched, so that it is not compiled again.
    """
    run = _Generators(wheel, arch, folder)
    with ThreadPoolExecutor() as pool:  # each job runs processes that take seconds
        jobs = (
            pool.submit(run.forward, filters),
            pool.submit(run.backward, filters),
        )
        forward, backward = (job.result() for job in jobs)
    if not forward.kernels and not backward.kernels:
        patterns = f"{filters.forward!r}, {filters.split_kv!r} or {filters.backward!r}"
        raise BuildError(f"no kernel matches {patterns}; {_NAMES}")
    return forward, backward


@dataclass(frozen=True)
class _Generators:
    """The wheel's scripts, for one architecture."""

    wheel: Wheel
    arch: str
    folder: Path

    def forward(self, filters: Filters) -> Sources:
        draft = self._draft("forward")
        attend = self._ck("fwd", filters.forward, draft)
        split = self._ck("fwd_splitkv", f"*@{filters.split_kv}", draft) - _drop_idle(draft)
        _check_matches(attend, filters.forward, filters)
        _check_matches(split, filters.split_kv, filters)
        for direction, nothing in _NOTHING.items():
            self._ck(direction, nothing, draft)
        script = self.wheel.csrc / "cpp_itfs" / "mha_fwd_generate.py"
        self._run(script, "--receipt", "5", "--output_dir", str(draft))
        self._run(self._asm("fwd"), "--output_dir", str(draft))
        files = _put_in_place(draft, self.folder / "forward")
        return Sources(files, attend + split, self._count("fwd") + self._count("fwd_splitkv"))

    def backward(self, filters: Filters) -> Sources:
        draft = self._draft("backward")
        script = self.wheel.csrc / "py_itfs_cu" / "fmha_bwd_pre_post_kernel_generate.py"
        self._run(script, "--filter", _PRE_POST_FILTER, "--output_dir", str(draft))
        _join(draft)
        kernels = self._ck("bwd", filters.backward, draft)
        _check_matches(kernels, filters.backward, filters)
        script = self.wheel.csrc / "cpp_itfs" / "mha_bwd_generate.py"
        self._run(script, "--receipt", "3", "--output_dir", str(draft))
        self._run(self._asm("bwd"), "--output_dir", str(draft))
        files = _put_in_place(draft, self.folder / "backward")
        return Sources(files, kernels, self._count("bwd"))

    def _count(self, direction: str) -> int:
        """The number of kernels without a filter."""
        path = self.folder / f"{direction}.txt"
        self._run(*self._ck_command(direction, _EVERYTHING[direction]), "--list_blobs", str(path))
        names = path.read_text(encoding="utf-8").split()
        return sum(not name.endswith("_api.cpp") for name in names)

    def _ck(self, direction: str, pattern: str, draft: Path) -> int:
        """Run CK's generator. Returns the number of kernels that it has written."""
        before = len(list(draft.iterdir()))
        self._run(*self._ck_command(direction, pattern), "--output_dir", str(draft))
        return len(list(draft.iterdir())) - before - 1  # one of the files is the dispatch

    def _ck_command(self, direction: str, pattern: str) -> Sequence[str | Path]:
        return (
            *(self.wheel.fmha / "generate.py", "--targets", _TARGETS[self.arch]),
            *("--direction", direction, "--receipt", "600", "--filter", pattern),
        )

    def _asm(self, direction: str) -> Path:
        return self.wheel.asm(self.arch) / f"fmha_v3_{direction}" / "codegen.py"

    def _draft(self, name: str) -> Path:
        draft = self.folder / f"{name}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        return draft

    def _run(self, script: str | Path, *arguments: str | Path) -> None:
        runner = str(Path(__file__).with_name("run_generator.py"))
        # -B: write no bytecode into the wheel's folders.
        command = [sys.executable, "-B", runner, self.arch, str(script), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(
                f"AITER's generator {script} failed; is the amd-aiter wheel complete? It says: "
                f"{done.stderr.strip()[-2000:]}"
            )


def _check_matches(kernels: int, pattern: str, filters: Filters) -> None:
    if not kernels and pattern in filters.must_match:
        raise BuildError(f"no kernel matches {pattern!r}; {_NAMES}; to build none, say 'none'")


def _drop_idle(draft: Path) -> int:
    """Remove combining kernels that match no attending kernel. Returns the number removed."""
    names = [path.name for path in draft.iterdir()]
    needed = {found.groups() for name in names if (found := _ATTENDS.match(name))}
    idle = [x for x in names if (found := _COMBINES.match(x)) and found.groups() not in needed]
    for name in idle:
        (draft / name).unlink()
    return len(idle)


def _join(draft: Path) -> None:
    """Join the small files, eight into one.

    There are some hundred files, and 90% of compiling one is reading the headers that all share.
    All use the same names, which end in _0, so each gets another number.
    """
    files = sorted(draft.glob("*.cpp"))
    texts = [
        re.sub(r"\b([a-z]\w*)_0\b", rf"\1_{index}", path.read_text(encoding="utf-8"))
        for index, path in enumerate(files)
    ]
    for path in files:
        path.unlink()
    for start in range(0, len(texts), _PRE_POST_GROUP):
        joined = draft / f"fmha_bwd_pre_post_{start // _PRE_POST_GROUP}.cpp"
        joined.write_text("\n".join(texts[start : start + _PRE_POST_GROUP]), encoding="utf-8")


def _put_in_place(draft: Path, folder: Path) -> tuple[Path, ...]:
    """Make `folder` hold the files of `draft`, without touching those that are the same.

    Returns the C++ files in it, and removes `draft`.
    """
    folder.mkdir(exist_ok=True)
    names = {path.name for path in draft.iterdir()}
    for stale in (path for path in folder.iterdir() if path.name not in names):
        stale.unlink()
    for name in names:
        new, old = draft / name, folder / name
        if not old.exists() or old.read_bytes() != new.read_bytes():
            new.replace(old)
    shutil.rmtree(draft)
    return tuple(sorted(folder.glob("*.cpp")))
