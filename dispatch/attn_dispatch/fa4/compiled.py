"""FlashAttention-4's kernels that `attn-dispatch build-fa4` compiled, as this process uses them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import jax

from attn_dispatch.devices import clear_rows, code_files, native_libraries
from attn_dispatch.fa4 import folder

FORWARD_TARGET = "attn_dispatch_fa4_forward"
BACKWARD_TARGET = "attn_dispatch_fa4_backward"
TANGENT_TARGET = "attn_dispatch_fa4_tangent"
WIDE_FORWARD_TARGET = "attn_dispatch_fa4_wide_forward"
WIDE_BACKWARD_TARGET = "attn_dispatch_fa4_wide_backward"
_STATE = "attn_dispatch_fa4_call"
_REMEDY = "run `attn-dispatch build-fa4`"
_AGAIN = "build it again with `attn-dispatch build-fa4`"


@dataclass(frozen=True)
class KernelSet:
    """The compiled kernels for one arch, one pair of head dims and one dtype (fa4_library.h)."""

    name: str
    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    forward_tile_m: int
    forward_tile_n: int
    backward_tile_m: int
    backward_tile_n: int
    backward_subtiles: int
    differentiates_grouped_heads: bool
    takes_sinks: bool = False
    variant: str = ""
    """The digest of the change of scores that they compute (score_variant.py); "" for none."""
    variant_name: str = ""
    """What build-fa4's user called it."""
    variant_arrays: str = ""
    """A letter for each array that it reads: f for float32, i for int32."""
    tangent_tile_m: int = 0
    """0 if there are no kernels of forward-mode derivatives."""
    tangent_tile_n: int = 0
    is_wide: bool = False
    """Whether the kernels are those for head dims beyond 256, which read no mask."""

    @property
    def forward_tiles(self) -> tuple[int, int]:
        """Query rows and keys of a tile, as the forward kernel's lists count them."""
        return self.forward_tile_m, self.forward_tile_n

    @property
    def backward_tiles(self) -> tuple[int, int]:
        """Query rows and keys of a tile, as the backward kernel's lists count them."""
        return self.backward_tile_m * self.backward_subtiles, self.backward_tile_n

    @property
    def tangent_tiles(self) -> tuple[int, int]:
        """Query rows and keys of a tile, as the lists of a forward-mode derivative count them."""
        return self.tangent_tile_m, self.tangent_tile_n

    @property
    def has_tangents(self) -> bool:
        """Whether the kernels of a forward-mode derivative are there."""
        return self.tangent_tile_m > 0


@dataclass(frozen=True)
class CompiledLibrary:
    """The compiled kernels, or the reason why this process cannot use them."""

    backend: ModuleType | None
    """`_cuda`, with the kernels loaded; None if they are not usable."""
    path: str = ""
    versions: str = ""
    """The packages that they were compiled with."""
    sets: tuple[KernelSet, ...] = ()
    unusable_reason: str = ""
    """Why the kernels cannot be used; empty if they can."""

    @property
    def is_usable(self) -> bool:
        return self.backend is not None

    def on(self, arch: str) -> CompiledLibrary:
        """The library with its sets for one architecture alone."""
        return replace(self, sets=tuple(x for x in self.sets if x.arch == arch))

    def set_for(
        self,
        head_dim: int,
        head_dim_v: int,
        dtype: str,
        *,
        variant: str = "",
        has_grouped_gradients: bool = False,
        has_tangents: bool = False,
        is_wide: bool = False,
    ) -> KernelSet | None:
        """The narrowest set that a call's columns fit into; None if there is none.

        All sets must be for one architecture.

        Args:
          head_dim: the columns of query and key.
          head_dim_v: the columns of value.
          dtype: the arrays' dtype.
          variant: the digest of the call's change of scores; "" for none.
          has_grouped_gradients: whether it is the backward pass of a call with fewer key heads
            than query heads, which not every set can run.
          has_tangents: whether it is a forward-mode derivative, which not every set can run.
          is_wide: whether the set is one of those for head dims beyond 256; no other call takes
            them.
        """
        fit = [
            x
            for x in self.sets
            if (x.dtype, x.variant, x.is_wide) == (dtype, variant, is_wide)
            and head_dim <= x.head_dim
            and head_dim_v <= x.head_dim_v
            and (x.differentiates_grouped_heads or not has_grouped_gradients)
            and (x.has_tangents or not has_tangents)
        ]
        return min(fit, key=lambda x: x.head_dim + x.head_dim_v, default=None)


def find() -> CompiledLibrary:
    """Load `_cuda` and through it the compiled kernels.

    The result is cached, but not a failure: later, the kernels may be compiled.
    """
    try:
        return _load()
    except _NotLoaded as failure:
        return failure.library


class _NotLoaded(Exception):
    def __init__(self, library: CompiledLibrary) -> None:
        super().__init__(library.unusable_reason)
        self.library = library


@lru_cache(maxsize=1)
def _load() -> CompiledLibrary:
    path = folder.library()
    try:
        backend = native_libraries.load(native_libraries.CUDA)
    except ImportError as error:
        raise _NotLoaded(_unusable(path, str(error))) from error
    library = load(backend, path)
    if not library.is_usable:
        raise _NotLoaded(library)
    return library


def load(backend: ModuleType, path: Path) -> CompiledLibrary:
    """Load the kernels in this file into `backend`, a `_cuda` module."""
    if kind := folder.no_file(path):  # opening a pipe would wait
        why = f"FlashAttention-4's kernels: expected the name of a file, got {path}, {kind}"
        return _unusable(path, why)
    if not os.path.isfile(path):
        why = f"FlashAttention-4's kernels are not compiled: {_REMEDY} (there is no file {path})"
        return _unusable(path, why)
    is_named = not folder.is_in_package(path)
    if problem := code_files.library_problem(path, is_named=is_named):
        return _unusable(path, f"FlashAttention-4's kernels: {problem}; {_AGAIN}")
    try:
        facts = backend.load_fa4(path)
    except RuntimeError as error:
        why = str(error)
        return _unusable(path, why if _AGAIN in why else f"{why}; {_AGAIN}")
    sets = tuple(KernelSet(*x) for x in facts["sets"])
    return CompiledLibrary(backend, facts["path"], facts["versions"], sets)


def _unusable(path: Path, why: str) -> CompiledLibrary:
    return CompiledLibrary(None, str(path), unusable_reason=why)


@lru_cache(maxsize=1)
def register() -> None:
    """Register the custom calls with XLA. Lowering for a device that is present does so itself.

    Only a process that runs an exported module without ever calling attention needs this.

    Raises:
      RuntimeError: if the kernels are not usable, with the reason.
    """
    library = find()
    if library.backend is None:
        raise RuntimeError(library.unusable_reason)
    register_handlers(library.backend, "CUDA")
    clear_rows.register()


def register_handlers(backend: ModuleType, platform: str) -> None:
    """Register the handlers of a `_cuda` module as custom calls of this XLA platform."""
    jax.ffi.register_ffi_type(_STATE, backend.fa4_state_type(), platform)
    handlers = backend.fa4_handlers()
    for target, stages in (
        (FORWARD_TARGET, handlers["forward"]),
        (BACKWARD_TARGET, handlers["backward"]),
        (TANGENT_TARGET, handlers["tangent"]),
        (WIDE_FORWARD_TARGET, handlers["wide_forward"]),
        (WIDE_BACKWARD_TARGET, handlers["wide_backward"]),
    ):
        jax.ffi.register_ffi_target(target, stages, platform=platform)


def build_command(arch: str) -> str:
    """The command that adds all sets for an architecture to what is compiled."""
    return f"`attn-dispatch build-fa4 --add --arch {arch}`"


def names(sets: Iterable[KernelSet]) -> str:
    """What sets are for, in messages: "head dims 64, 192/128 in bfloat16 and float16"."""
    dims_of: dict[tuple[str, str], list[str]] = {}
    for x in sets:
        both = f"{x.head_dim}" if x.head_dim == x.head_dim_v else f"{x.head_dim}/{x.head_dim_v}"
        dims_of.setdefault((x.dtype, x.variant_name), []).append(both)
    dtypes_of: dict[tuple[str, str], list[str]] = {}
    for (dtype, mod), dims in dims_of.items():
        dtypes_of.setdefault((", ".join(dims), mod), []).append(dtype)
    return "; ".join(
        f"head dims {dims} in {' and '.join(dtypes)}{mod and f' with {mod}'}"
        for (dims, mod), dtypes in dtypes_of.items()
    )
