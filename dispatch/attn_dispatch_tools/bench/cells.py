"""A cell: one attention call that all packages compute."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from attn_dispatch_tools.bench.mask_shares import Shares, seen, shares
from attn_dispatch_tools.bench.masks import Mask

BACKWARD_OVER_FORWARD = 2.5
"""How many forward passes a backward pass costs: 5 matrix products (one computes the scores again)
to 2. This is FlashAttention's convention. It is also used if value is narrower than query."""

WORK = {
    "forward": 1.0,
    "backward": BACKWARD_OVER_FORWARD,
    "forward_backward": 1.0 + BACKWARD_OVER_FORWARD,
}
"""How many forward passes each direction costs."""

DENSE_CAUSAL = "dense causal: flash"
"""The peer by whose time those of masks are divided. It computes a causal call without the mask."""


@dataclass(frozen=True)
class Cell:
    """A call in bfloat16 with as many queries as keys: query [B, T, N, H], key [B, T, K, H].

    With `lengths` the sequences are packed: `batch` is 1, and `seq_len` the sum of the lengths.
    """

    grid: str
    family: str
    """The name that cells of different lengths share: "d128 causal"."""
    batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    is_causal: bool = True
    window: int | None = None
    """The largest number of keys that a query sees, the one at its position included; None: all."""
    lengths: tuple[int, ...] = ()
    longest: int = 0
    """For packed sequences: the longest that callers declare; also the padded batch's length."""
    mask: Mask | None = None
    """What the call's mask is; the fields above do not describe it."""
    calls: int = 1
    """The number of calls in a program, each with the result of the one before as its query."""

    @property
    def label(self) -> str:
        """The name of the cell within its family."""
        size = f"{self.seq_len // 1024}k" if self.seq_len % 1024 == 0 else str(self.seq_len)
        return f"b{self.batch} {size}"

    @property
    def name(self) -> str:
        return f"{self.family} {self.label}"

    @property
    def pairs(self) -> float:
        """The number of pairs of a query and a key in one head that count; causality halves it."""
        if self.mask is not None:
            return float(self.batch * seen(self.mask, self.seq_len).pairs)
        lengths = self.lengths or (self.seq_len,) * self.batch
        return float(sum(map(self._pairs_of, lengths)))

    @property
    def forward_flops(self) -> float:
        """2 · pairs · N · (H + Hv): for equal dims 4 · B · T² · N · H, halved by causality.

        Padding never counts. Those of all calls.
        """
        return 2 * self.calls * self.pairs * self.num_heads * (self.head_dim + self.head_dim_v)

    def flops(self, direction: str) -> float:
        """The operations of "forward", "backward" or "forward_backward"."""
        return WORK[direction] * self.forward_flops

    @property
    def shares(self) -> Shares | None:
        """What the mask leaves of a causal call; None without one."""
        return None if self.mask is None else shares(self.mask, self.seq_len)

    def to_json(self) -> dict[str, Any]:
        facts = asdict(self) | {
            "lengths": list(self.lengths), "name": self.name, "forward_flops": self.forward_flops
        }  # fmt: skip
        if self.shares is None:
            del facts["mask"]
        else:
            facts["shares"] = asdict(self.shares)
        return facts

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cell:
        names = {x.name for x in fields(cls)} & data.keys() - {"mask"}
        known: dict[str, Any] = {x: data[x] for x in names} | {"lengths": tuple(data["lengths"])}
        mask = data.get("mask")
        return cls(**known, mask=None if mask is None else Mask(**mask))

    def _pairs_of(self, length: int) -> float:
        if self.window is not None and self.window < length:
            # Most queries see a whole window; those at the start see a triangle of fewer keys.
            return (length - self.window) * self.window + self.window**2 / 2
        return length**2 * (0.5 if self.is_causal else 1.0)
