"""The sets of kernels that are compiled: for each architecture, pair of head dims and dtype."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

ARCHS = ("sm90", "sm100")
"""Hopper, the default, and Blackwell (B200), on which no kernel has run."""

DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Tiles:
    """A tile of a kernel, in query rows (m) and keys (n)."""

    tile_m: int
    tile_n: int

    @property
    def subtiles(self) -> int:
        """The number of the backward kernel's tiles, side by side, that one entry of a list stands
        for: 128 query rows."""
        return _ROWS_OF_AN_ENTRY // self.tile_m


@dataclass(frozen=True)
class ForwardTiles(Tiles):
    """A tile of the forward kernel for sm90."""

    weights_in_registers: bool = True


@dataclass(frozen=True)
class BackwardTiles(Tiles):
    """A tile of the backward kernel for sm90, and how its warps share it."""

    query_stages: int
    out_grad_stages: int
    score_stages: int
    scores_transposed: bool
    key_grad_transposed: bool
    key_grad_layout: int
    query_grad_layout: int
    query_grad_by_one_group: bool = False


_ROWS_OF_AN_ENTRY = 128


@dataclass(frozen=True)
class Variant:
    """A change of scores that kernels are compiled with (attn_dispatch/fa4/score_variant.py)."""

    name: str
    """As the user names the mod."""
    digest: str
    forward: str
    backward: str
    types: str
    is_small_at_zero: bool
    """Whether a score of 0 surely becomes no large number, of which the softmax's exponential is
    infinity. Kernels compute some rows past the last, with scores of 0."""

    @staticmethod
    def from_json(facts: dict[str, object]) -> Variant:
        """The variant with these fields.

        Raises:
          TypeError: they are not this class's.
        """
        is_small = facts.get("is_small_at_zero")
        texts = {x: y for x, y in facts.items() if x != "is_small_at_zero" and isinstance(y, str)}
        if not isinstance(is_small, bool) or len(texts) + 1 != len(facts):
            raise TypeError(f"expected the fields of a Variant, got {facts}")
        return Variant(**texts, is_small_at_zero=is_small)


@dataclass(frozen=True)
class KernelSet:
    """The kernels for one architecture, one pair of head dims and one dtype."""

    arch: str
    head_dim: int
    head_dim_v: int
    dtype: str
    forward: Tiles
    backward: Tiles
    tangent: Tiles | None = None
    """None if the set has no kernels of forward-mode derivatives."""
    variant: Variant | None = None

    @property
    def name(self) -> str:
        """Part of symbols: "sm90_d128_bfloat16", "sm90_d192_128_float16_DIGEST"."""
        both = f"{self.head_dim}" if self.head_dim == self.head_dim_v else self._two_dims
        variant = "" if self.variant is None else f"_{self.variant.digest}"
        return f"{self.arch}_d{both}_{self.dtype}{variant}"

    @property
    def is_wide(self) -> bool:
        """Whether the kernels are those for head dims beyond 256, of another package."""
        return self.head_dim > _WIDEST_OF_FA4

    @property
    def _two_dims(self) -> str:
        return f"{self.head_dim}_{self.head_dim_v}"

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the set's kernels.

        Grouped heads need as many columns of values as of keys: the kernel sums both gradients in
        the shared memory of one. Kernels for sm100 take no sinks. Tangents are of calls that do not
        change scores.
        """
        if self.is_wide:
            return _WIDE_KERNELS
        masked = ("forward", "forward_bits", "backward", "backward_bits")
        grouped = ("backward_grouped", "backward_bits_grouped", "key_value_grad")
        sinks = ("forward_sinks", "forward_bits_sinks") if self.arch == "sm90" else ()
        tangents = ("tangent", "tangent_bits") if self.tangent_tiles != (0, 0) else ()
        shared = (*masked, *sinks, "preprocess", "query_grad", *tangents)
        return (*shared, *grouped) if self.head_dim == self.head_dim_v else shared

    @property
    def tangent_tiles(self) -> tuple[int, int]:
        """Query rows and keys of a tangent's tile; 0 and 0 if the set computes none."""
        tile = self.tangent
        return (0, 0) if tile is None or self.variant is not None else (tile.tile_m, tile.tile_n)

    def as_json(self) -> dict[str, object]:
        """What export_kernels.py reads."""
        backward = dataclasses.asdict(self.backward) | {"subtiles": self.backward.subtiles}
        return {
            **dataclasses.asdict(self),
            "backward": backward,
            "name": self.name,
            "kernels": self.kernels,
        }


# The tiles for sm90 are those of FlashAttention's own interface, which tuned them on an H100.
_SM90 = {
    (64, 64): (
        ForwardTiles(192, 128),
        BackwardTiles(128, 128, 2, 2, 2, True, False, 2, 2),
    ),
    (96, 96): (
        ForwardTiles(192, 128, weights_in_registers=False),
        BackwardTiles(64, 128, 2, 2, 2, True, False, 2, 1, query_grad_by_one_group=True),
    ),
    (128, 128): (
        ForwardTiles(128, 128),
        BackwardTiles(64, 128, 2, 2, 2, True, False, 2, 1),
    ),
    (192, 128): (
        ForwardTiles(128, 128),
        BackwardTiles(64, 96, 2, 2, 1, False, True, 2, 1),
    ),
    (192, 192): (
        ForwardTiles(128, 112),
        BackwardTiles(64, 96, 2, 1, 1, False, True, 2, 1),
    ),
    (256, 256): (
        ForwardTiles(128, 80),
        BackwardTiles(64, 64, 1, 1, 1, False, False, 1, 1),
    ),
}

_WIDEST_OF_FA4 = 256

# One tile for each kernel, which ffpa-attn has. Narrower calls than 384 or 512 columns take as long
# as these.
_WIDE_SM90 = {(x, x): (Tiles(64, 64), Tiles(64, 64)) for x in (384, 512)}
_WIDE_KERNELS = (
    "wide_forward", "wide_forward_causal", "wide_key_grads", "wide_key_grads_causal",
    "wide_query_grad", "wide_query_grad_causal",
)  # fmt: skip

_TANGENT = dict.fromkeys(((64, 64), (128, 128), (192, 128)), Tiles(64, 64))
"""The tiles of kernels of forward-mode derivatives for sm90, of the head dims that have them."""

# The forward kernel for sm100 has two tiles of 128 query rows at a time, for which a list has one
# line. Both kernels end at head dim 128, but for 192/128. The backward kernel of that runs as
# clusters of two, whose lists and sums of dq are others than those of cuda_backend/fa4.
_SM100 = {(x, x): (Tiles(256, 128), Tiles(128, 128)) for x in (64, 96, 128)}

SETS = {
    x.name: x
    for arch, tiles_of in zip(ARCHS, (_SM90 | _WIDE_SM90, _SM100), strict=True)
    for dims, tiles in tiles_of.items()
    for tangent in (_TANGENT.get(dims) if arch == "sm90" else None,)
    for x in (KernelSet(arch, *dims, dtype, *tiles, tangent) for dtype in DTYPES)
}
"""Every set by its name."""
