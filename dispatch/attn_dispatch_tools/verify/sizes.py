"""Sizes that stress kernels' tiles, and how blocks of the table of cases become cases.

A block is a family's features times some sizes. A feature's facts are fields of `Case`, in a form
that does not depend on the size: shapes of masks and biases are letters ("1n1s" for [1, N, 1, S]),
lengths are fractions, packed rows are `Packed`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attn_dispatch_tools.verify.case import Case

Facts = dict[str, Any]

CAUSAL: Facts = {"is_causal": True}
BOTTOM_RIGHT: Facts = {"is_causal": True, "alignment": "bottom_right"}

# Few sizes mean few programs to compile. cuDNN's masks had bugs at lengths of 64 modulo 128; no
# tile size divides 100 or 333.
SQUARE: Facts = {"t": 256, "s": 256, "dtype": "bfloat16", "h": 64}
SQUARE_F16: Facts = {"t": 256, "s": 256, "dtype": "float16", "h": 64}
SQUARE_D128: Facts = {"t": 256, "s": 256, "dtype": "bfloat16", "h": 128}
HALF_TILE: Facts = {"t": 192, "s": 192, "dtype": "float16", "h": 128}
MORE_KEYS: Facts = {"t": 128, "s": 320, "dtype": "bfloat16", "h": 128}
MORE_QUERIES: Facts = {"t": 320, "s": 192, "dtype": "float16", "h": 64}
ODD: Facts = {"t": 100, "s": 333, "dtype": "bfloat16", "h": 64}
SMALL: Facts = {"t": 33, "s": 17, "dtype": "float16", "h": 64, "n": 4, "k": 1}
ONE_QUERY: Facts = {"t": 1, "s": 512, "dtype": "bfloat16", "h": 128, "n": 8}
MLA: Facts = {"t": 192, "s": 256, "dtype": "bfloat16", "h": 192, "v": 128, "k": 4}
EIGHTY: Facts = {"t": 192, "s": 192, "dtype": "bfloat16", "h": 80, "n": 3, "k": 1}

FOUR = (SQUARE, HALF_TILE, MORE_KEYS, MORE_QUERIES)
SIX = (*FOUR, ODD, SMALL)

_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


@dataclass(frozen=True)
class Packed:
    """Segment ids of rows, for each row as runs of (id, share of the row); the rest is padding."""

    queries: tuple[tuple[tuple[int, float], ...], ...]
    keys: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """The keys' runs; None if they are those of the queries."""

    def facts(self, t: int, s: int) -> Facts:
        """q_segments and kv_segments for rows of these lengths."""
        keys = self.keys or self.queries
        return {
            "b": len(self.queries),
            "q_segments": tuple(_ids(row, t) for row in self.queries),
            "kv_segments": tuple(_ids(row, s) for row in keys),
        }

    def most(self, max_segments: int) -> Facts:
        """The facts of a call with these ids, and with max_segments."""
        return {"packed": self, "max_segments": max_segments}


@dataclass(frozen=True)
class Ragged:
    """Packed sequences by cu_seqlens, for each row as the sequences' shares of it."""

    queries: tuple[tuple[float, ...], ...]
    keys: tuple[tuple[float, ...], ...]

    def facts(self, t: int, s: int) -> Facts:
        """cu_q, cu_kv and the longest sequences, for rows of these lengths."""
        q, kv = (
            [[round(share * length) for share in row] for row in rows]
            for rows, length in ((self.queries, t), (self.keys, s))
        )
        return {
            "b": len(q),
            "cu_q": _starts(q),
            "cu_kv": _starts(kv),
            "longest": (max(map(max, q)), max(map(max, kv))),
        }


def case(name: str, **facts: Any) -> Case:
    """A case of a kernel's size; by default bfloat16, with two kv heads and the default scale."""
    sizes = {"b": 2, "t": 256, "s": 256, "n": 4, "k": 2, "h": 64, "dtype": "bfloat16"} | facts
    packed = sizes.pop("packed", None)
    if packed is not None:
        sizes |= packed.facts(sizes["t"], sizes["s"])
    for name_, full in (("q_lengths", sizes["t"]), ("kv_lengths", sizes["s"])):
        if name_ in sizes:
            sizes[name_] = tuple(round(share * full) for share in sizes[name_])
            sizes["b"] = len(sizes[name_])
    for array in {"mask", "bias"} & sizes.keys():
        letters = {"1": 1, "b": sizes["b"], "n": sizes["n"], "t": sizes["t"], "s": sizes["s"]}
        sizes[array] = tuple(letters[letter] for letter in sizes[array])
    if sizes.get("bias_dtype") == "same":
        sizes["bias_dtype"] = sizes["dtype"]
    if sizes.get("transform") in ("vmap", "scan"):
        sizes["b"] = max(sizes["b"], 4)
    sizes.setdefault("v", sizes["h"])
    sizes.setdefault("scale", 1 / math.sqrt(sizes["h"]))
    return Case(name, **sizes)


@dataclass(frozen=True)
class Block:
    """Rows of the table of cases: features of a family, each at every size."""

    family: str
    sizes: tuple[Facts, ...]
    features: dict[str, Facts]
    shared: Facts = field(default_factory=dict[str, Any])
    """Facts of every feature that does not have others in their place."""
    in_turn: bool = False
    """Whether each feature is at one size only, and the sizes take turns."""

    def cases(self) -> tuple[Case, ...]:
        """The cases of the rows."""
        return tuple(
            case(f"{self.family}/{name}_{label(size)}", **(size | self.shared | facts))
            for i, (name, facts) in enumerate(self.features.items())
            for size in ((self.sizes[i % len(self.sizes)],) if self.in_turn else self.sizes)
        )


def label(size: Facts) -> str:
    """ "bf16_d64_256x256": what a size is called in the names of cases."""
    dims = f"d{size['h']}" + (f"v{size['v']}" if "v" in size else "")
    return f"{_SHORT[size['dtype']]}_{dims}_{size['t']}x{size['s']}"


def _ids(runs: tuple[tuple[int, float], ...], length: int) -> tuple[int, ...]:
    ids = [x for x, share in runs for _ in range(round(share * length))][:length]
    return tuple(ids + [0] * (length - len(ids)))


def _starts(rows: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple((0, *(int(x) for x in np.cumsum(row))) for row in rows)
