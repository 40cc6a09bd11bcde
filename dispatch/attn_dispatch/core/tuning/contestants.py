"""The ways to compute a call that a contest compares, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass, field

from attn_dispatch import settings
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.console import print_line
from attn_dispatch.core import select
from attn_dispatch.core.rewrites.rewrite import SEQUENCE_OPERANDS, is_affordable
from attn_dispatch.core.tuning import timing
from attn_dispatch.devices.device import Device


@dataclass(frozen=True)
class Contestant:
    """One way to compute a call: an implementation and one of its engines."""

    choice: select.Choice
    engine: str = ""

    @property
    def name(self) -> str:
        return f"{self.choice.NAME} {self.engine}".strip()

    def others(self, device: Device) -> tuple[str, ...]:
        """The engines similar to its own; none if the implementation cannot name them."""
        implementation = self.choice.implementation
        try:
            return implementation.other_engines(self.choice.chain.spec, device)
        except Exception as error:  # another package may raise anything
            print_line(f"{implementation.NAME}: other_engines failed: {first_line(error)}")
            return ()


@dataclass
class Standings:
    """The results so far."""

    seconds: dict[Contestant, float] = field(default_factory=dict[Contestant, float])
    programs: dict[Contestant, timing.JittedCall] = field(
        default_factory=dict["Contestant", timing.JittedCall]
    )
    left_out: dict[str, str] = field(default_factory=dict[str, str])

    def best(self, count: int) -> list[Contestant]:
        return sorted(self.seconds, key=self.seconds.__getitem__)[:count]


def with_default_engines(spec: AttentionSpec, device: Device) -> list[Contestant]:
    """The implementations that can run the call, with default engines, the untuned choice first."""
    choices = select.candidates(spec, device)
    if not choices:
        return []
    untuned = choices[0].implementation
    has_sequences = any(spec.has(name) for name in SEQUENCE_OPERANDS)
    keeps_nan_apart = untuned.KEEPS_NAN_APART and has_sequences
    # XLA keeps the scores in memory, and takes very long where there are many.
    pairs = (spec.batch, spec.num_heads, spec.seq_len_q, spec.seq_len_kv)
    is_strict = settings.current().fallback == "error"
    return [
        Contestant(choice)
        for choice in choices
        if choice.implementation is untuned
        or not (
            choice.chain.may_fall_back
            or (keeps_nan_apart and not choice.implementation.KEEPS_NAN_APART)
            or (choice.implementation.PLATFORM is None and (is_strict or not is_affordable(pairs)))
        )
    ]


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
