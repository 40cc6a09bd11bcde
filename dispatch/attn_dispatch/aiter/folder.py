"""The folder in which `attn-dispatch build-aiter` puts AITER's libraries."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from attn_dispatch.aiter.release import DEV18, GENERATIONS, Release
from attn_dispatch.devices.aiter_versions import version_of
from attn_dispatch.devices.device import Device
from attn_dispatch.files import reading, user_folders

GENERATION = DEV18.generation
"""The version of the C++ interface of AITER's wheel, which changes from release to release."""
WHEEL_VERSION = "0.1.7.post2.dev18"
ARCHS = ("gfx942", "gfx950")
ADAPTER = "libattn_dispatch_aiter.so"

_RECORD = "build.json"
_MAX_BYTES = 2**20


@dataclass(frozen=True)
class AiterBuild:
    """A finished build, as its build.json records it."""

    generation: str
    arch: str
    wheel_version: str
    filter_forward: str
    filter_backward: str
    filter_split_kv: str
    compiler: str
    compile_check_only: bool
    """Whether the library was built without ROCm's headers; it must never be loaded beside ROCm."""
    files: int
    """The number of compiled C++ files."""
    asm_kernels: int
    date: str

    def write(self, folder: Path) -> None:
        """Write the record into `folder`, as the last step: a folder with a record is complete."""
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        (folder / _RECORD).write_text(text, encoding="utf-8")


def root(generation: str = GENERATION) -> Path:
    """$ATTN_DISPATCH_AITER, or else a folder of the user for each generation. It has a subfolder
    per architecture."""
    if chosen := os.environ.get("ATTN_DISPATCH_AITER"):
        # Path.expanduser raises where there is no such user.
        return Path(os.path.expanduser(chosen))
    return user_folders.data() / "aiter" / generation


def folder(arch: str) -> Path:
    """The folder where the libraries for `arch` ("gfx942") are, of the newest generation that is
    built, or will be built."""
    places = [root(generation) / arch for generation in GENERATIONS]
    return next((x for x in places if os.path.isfile(x / _RECORD)), root() / arch)


def release(arch: str) -> Release:
    """The release of AITER that is built for `arch`, or for which calls are planned."""
    try:
        build = read(folder(arch))
    except ValueError:
        return DEV18  # loading the library says what is wrong
    if build is None or build.generation not in GENERATIONS:
        return DEV18
    return Release(build.generation, version_of(build.wheel_version) or DEV18.version)


def releases(arch: str) -> tuple[Release, ...]:
    """The releases that serve calls for `arch`, in the order in which they are asked.

    Where the newest has ASM kernels alone, what only CK runs is left to dev18, if it is built too.
    """
    newest, second = release(arch), folder_of(DEV18, arch)
    is_alone = newest.has_ck or second == folder(arch) or not os.path.isfile(second / _RECORD)
    return (newest,) if is_alone else (newest, DEV18)


def folder_of(one: Release, arch: str) -> Path:
    """The folder of the libraries of one of the releases that serve calls for `arch`."""
    return folder(arch) if one == release(arch) else root(one.generation) / arch


def releases_for(device: Device) -> tuple[Release, ...]:
    """The releases of AITER by which a device's calls are planned."""
    if device.library is None:
        return releases(device.arch)
    version = version_of(device.library[1])
    assert version is not None
    return (DEV18 if version == DEV18.version else Release(GENERATIONS[0], version),)


def version() -> str:
    """The version of AITER that is built here, or of the wheel that would be; both if there are
    two."""
    for arch in ARCHS:
        try:
            builds = [read(folder_of(x, arch)) for x in releases(arch)]
        except ValueError:
            continue
        if found := [x.wheel_version for x in builds if x]:
            return " and ".join(found)
    return WHEEL_VERSION


def libraries(arch: str) -> tuple[str, str, str]:
    """The library files of a build. Names that the linker looks up contain the architecture,
    because a process with GPUs of two kinds loads both builds."""
    return f"libmha_fwd_{arch}.so", f"libmha_bwd_{arch}.so", ADAPTER


def asm_folder(folder: Path, arch: str) -> Path:
    """The folder where a build's libraries find ASM kernels (rocm_backend/aiter_asm_folder.cc)."""
    return folder / "hsa" / arch


def asm_kernels(folder: Path) -> list[Path]:
    """The attention ASM kernels in AITER's folder for one architecture."""
    return sorted(x for x in folder.glob("fmha_v3_*/**/*.co") if os.path.isfile(x))


def read(folder: Path) -> AiterBuild | None:
    """The finished build in `folder`; None if there is none.

    Raises:
      ValueError: the record cannot be read by this version; the message says why.
    """
    path = folder / _RECORD
    try:
        facts = reading.json_file(path, _MAX_BYTES, is_kept=True)
        return _build_of(facts)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = error.strerror or str(error)
        if isinstance(error, NotADirectoryError):
            why += "; ATTN_DISPATCH_AITER names a folder, with one for each architecture in it"
        raise ValueError(f"{path} cannot be read: {why}") from error
    except ValueError as error:
        raise ValueError(
            f"{path} is not a record this version can read ({error}); build again with: "
            f"attn-dispatch build-aiter --arch {folder.name}"
        ) from error


def _build_of(facts: object) -> AiterBuild:
    fields = {x.name: x.type for x in dataclasses.fields(AiterBuild)}
    given = reading.as_object(facts)
    if given is None or given.keys() != fields.keys():
        got = type(facts).__name__ if given is None else ", ".join(map(repr, given))[:200]
        raise ValueError(f"expected an object with {', '.join(fields)}, got {got or 'none'}")
    for name, kind in fields.items():
        if type(given[name]).__name__ != kind:
            raise ValueError(f"expected {kind} as {name}, got {str(given[name])[:80]!r}")
    return AiterBuild(**given)


def forget(folder: Path) -> None:
    """Remove the record, before the libraries it describes are replaced."""
    (folder / _RECORD).unlink(missing_ok=True)
