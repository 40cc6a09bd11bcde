"""Compiling sets of kernels, several at once, and keeping the objects for the next build."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

from attn_dispatch_tools.build_fa4 import environment
from attn_dispatch_tools.build_fa4.hosts import Host, this_machine
from attn_dispatch_tools.build_fa4.processes import run
from attn_dispatch_tools.build_fa4.sets import KernelSet

_NAMES = (
    "export_kernels.py", "exporting.py", "forward_kernel.py", "mask_forms.py", "score_functions.py",
    "sm100_kernels.py", "tangent_kernel.py", "tile_order.py",
)  # fmt: skip
_WIDE_NAMES = ("export_wide_kernels.py", "exporting.py", "torch_names.py")
SCRIPTS = tuple(map(Path(__file__).with_name, _NAMES))
"""The program that compiles, and the files that it imports."""
WIDE_SCRIPTS = tuple(map(Path(__file__).with_name, _WIDE_NAMES))
"""The same of sets for head dims beyond 256."""
_SYMBOLS = "symbols.json"
_COMPILE_SECONDS = 1800

Report = Callable[[str], None]
"""Called with the name of each set as it is done."""


@dataclass(frozen=True)
class Compiled:
    """The object files of one set, with the code of a host around that of the GPU."""

    set: KernelSet
    folder: Path
    host: Host = field(default_factory=this_machine)

    @property
    def objects(self) -> tuple[Path, ...]:
        return tuple(self.folder / f"{x}.o" for x in self.set.kernels)

    @property
    def symbols(self) -> dict[str, str]:
        """The symbol of each kernel's host function."""
        return json.loads((self.folder / _SYMBOLS).read_text(encoding="utf-8"))

    @property
    def is_complete(self) -> bool:
        """Whether everything is there. The symbols are written last."""
        return all(x.is_file() for x in (*self.objects, self.folder / _SYMBOLS))


def kept(cache: Path, kernels: KernelSet, host: Host | None = None) -> Compiled:
    """Where the objects of a set are or will be: one folder for each version of what makes them.

    Without a `host` they are for this machine.
    """
    host = host or this_machine()
    facts = json.dumps(_unnamed(kernels).as_json(), sort_keys=True)
    sources = (x.read_text(encoding="utf-8") for x in _scripts(kernels))
    is_wide = kernels.is_wide
    versions = environment.versions(has_narrow=not is_wide, has_wide=is_wide)
    text = "\n".join((versions, host.target, facts, *sources))
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Compiled(kernels, cache / "objects" / f"{kernels.name}-{key}", host)


def _scripts(kernels: KernelSet) -> tuple[Path, ...]:
    return WIDE_SCRIPTS if kernels.is_wide else SCRIPTS


def _unnamed(kernels: KernelSet) -> KernelSet:
    """The set without the name of its mod, by which nothing is compiled."""
    variant = kernels.variant
    return kernels if variant is None else replace(kernels, variant=replace(variant, name=""))


def compile_all(missing: Sequence[Compiled], python: Path, jobs: int, report: Report) -> None:
    """Compile the sets that are not kept yet. After a failure no further one is begun."""
    has_failed = threading.Event()

    def compile_unless_failed(compiled: Compiled) -> bool:
        if has_failed.is_set():
            return False
        try:
            _compile(compiled, python)
        except BaseException:
            has_failed.set()
            raise
        return True

    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(compile_unless_failed, x): x for x in missing}
        try:
            for future in as_completed(running):
                if future.result():
                    report(running[future].set.name)
        except BaseException:
            has_failed.set()
            raise


def _compile(compiled: Compiled, python: Path) -> None:
    draft = compiled.folder.with_name(f"{compiled.folder.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        # -I: the current folder and PYTHONPATH must not replace packages of the environment.
        script, *_ = _scripts(compiled.set)
        command = [python, "-I", script, draft, json.dumps(compiled.set.as_json())]
        command.append(compiled.host.target)
        run(command, what=f"compiling {compiled.set.name}", seconds=_COMPILE_SECONDS)
        shutil.rmtree(compiled.folder, ignore_errors=True)
        draft.rename(compiled.folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
