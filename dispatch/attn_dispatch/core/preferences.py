"""The order of implementations for a call: preferences that were measured, as a table.

A row of preferences.json puts one implementation first for the calls that fit it. The table is
replayed against the times that it was made from (tests/core/test_preferences.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import NotRequired, TypedDict

from attn_dispatch import settings
from attn_dispatch.call.features import features_of
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import scratch
from attn_dispatch.core.eligibility import reasons_and_chain, reasons_as_it_is
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Implementation

_TILE = 128
"""Rows of queries that a kernel's block takes."""

_Fact = str | bool | float

IsExpected = Callable[[Implementation, Device], bool]


class Row(TypedDict):
    """An implementation that was measured to be the fastest for some calls."""

    first: str
    by_rewrites: NotRequired[bool]
    """Whether the implementation comes first also where it runs the call by rewrites only."""
    calls: dict[str, str | bool | list[float] | list[str]]
    """The facts of the calls: a value, the least and largest number, or several words. They are
    compared in this order; "features" takes longest to find."""
    measured: str
    """The file of results."""


class Loss(TypedDict):
    """A measured call for which the rows choose an implementation that is not the best."""

    cell: str
    direction: str
    """ "forward", or "step": forward and backward."""
    without: list[str]
    """The extras that are not installed then."""
    file: str
    cause: str


class _File(TypedDict):
    rows: list[Row]
    losses: list[Loss]


def in_order(
    implementations: Sequence[Implementation],
    spec: AttentionSpec,
    device: Device,
    is_expected: IsExpected,
) -> Sequence[Implementation]:
    """The implementations, best first for this call on this device: those that rows put first, then
    the others as they were."""
    first = [x for x, _ in put_first(implementations, spec, device, is_expected)]
    return (*first, *(x for x in implementations if x not in first)) if first else implementations


def put_first(
    implementations: Sequence[Implementation],
    spec: AttentionSpec,
    device: Device,
    is_expected: IsExpected,
) -> list[tuple[Implementation, Row]]:
    """The implementations that rows put first for this call on this device, each with its row.

    They come in the order of the rows, up to one that is known to run the call. XLA comes first
    only if no row before it fits, if the fallback policy is not "error", if a kernel would run the
    call, and if XLA takes little scratch memory. An extra does only if it runs the call as it is,
    unless its row allows rewrites.

    Args:
      is_expected: whether an implementation is for the device and, if it is an extra, usable.
    """
    rows = _table().get((device.arch, spec.is_backward), ())
    if not rows or not _is_measured(spec):
        return []
    facts, first = _Facts(spec, device), list[tuple[Implementation, Row]]()
    by_name = {x.NAME: x for x in implementations if is_expected(x, device)}
    for row in rows:
        x = by_name.get(row["first"])
        if x is None or not _fits(row["calls"], facts) or any(x is y for y, _ in first):
            continue
        if x.PLATFORM is None:
            if first or not _may_replace_kernels(x, by_name.values(), spec, device):
                continue
        elif not row.get("by_rewrites", not x.IS_EXTRA) and reasons_as_it_is(x, spec, device):
            continue
        first.append((x, row))
        if x.PLATFORM is None or not row.get("by_rewrites", not x.IS_EXTRA):
            break  # it runs the call
    return first


def _may_replace_kernels(
    xla: Implementation, known: Iterable[Implementation], spec: AttentionSpec, device: Device
) -> bool:
    """Whether XLA may come before kernels. They keep to a limit of scratch memory, and XLA copies
    its operands. If no kernel runs the call, the warning of `select.choose` says why."""
    if settings.current().fallback == "error":
        return False
    limit = scratch.limit_of(spec, device, lambda: 0)
    if limit is not None and xla.plan(spec, device).scratch_bytes > limit.bytes:
        return False
    # Extras first: their rules answer at once, and cuDNN has to plan.
    kernels = sorted((x for x in known if x.PLATFORM), key=lambda x: not x.IS_EXTRA)
    return any(not reasons_and_chain(x, spec, device)[0] for x in kernels)


def _is_measured(spec: AttentionSpec) -> bool:
    """False for calls that only XLA runs: why no kernel does is the warning of `select.choose`."""
    is_16_bit = spec.dtype in ("bfloat16", "float16")
    return is_16_bit and spec.wanted.derivative is None and not (spec.symbols or spec.is_empty)


_OF_A_CALL: Mapping[str, Callable[[AttentionSpec], _Fact]] = {
    "sequences": lambda spec: _sequences(spec),
    "features": lambda spec: " + ".join(x for x in features_of(spec) if x not in _OTHER_FACTS),
    "sinks": lambda spec: spec.has("sinks"),
    "soft_cap": lambda spec: spec.meaning.logits_soft_cap is not None,
    "mask_mod": lambda spec: spec.meaning.mask_mod is not None,
    "causal": lambda spec: spec.meaning.is_causal,
    "has_window": lambda spec: spec.band not in ((None, None), (None, 0)),
    "batch": lambda spec: spec.batch,
    "queries": lambda spec: spec.seq_len_q,
    "tiles": lambda spec: spec.batch * spec.num_heads * -(-spec.seq_len_q // _TILE),
    "keys": lambda spec: spec.seq_len_kv,
    "keys_per_query": lambda spec: spec.seq_len_kv / spec.seq_len_q,
    "longest": lambda spec: spec.longest_sequences[0],
    "queries_per_sequence": lambda spec: spec.seq_len_q / (spec.most_sequences or 1),
    "head_dim": lambda spec: spec.head_dim,
    "head_dim_v": lambda spec: spec.head_dim_v,
    "same_head_dims": lambda spec: spec.head_dim == spec.head_dim_v,
    "heads_per_kv_head": lambda spec: spec.num_heads // spec.num_kv_heads,
    "lse_grad": lambda spec: spec.has("lse_grad"),
}
"""What rows may say of calls, beside the arch, the direction and the device's product."""

_OTHER_FACTS = (
    "lengths", "segment ids", "cu_seqlens", "causality and windows", "the gradient of lse",
    "the gradient of sinks",
)  # fmt: skip
"""The features that "features" leaves out: other facts say them, or sinks include them."""

FACTS = frozenset(_OF_A_CALL) | {"arch", "direction", "product"}


class _Facts(dict[str, _Fact]):
    """The facts of a call on a device, each found when a row first asks for it."""

    def __init__(self, spec: AttentionSpec, device: Device) -> None:
        super().__init__()
        self._spec, self._device = spec, device

    def __missing__(self, name: str) -> _Fact:
        # "H100" of "NVIDIA H100 80GB HBM3"
        found = (
            " ".join(self._device.name.split()[1:2])
            if name == "product"
            else _OF_A_CALL[name](self._spec)
        )
        self[name] = found
        return found


def _sequences(spec: AttentionSpec) -> str:
    """What says where the sequences of a batch row are."""
    if spec.has_lengths:
        return "lengths"
    if spec.has("query_segment_ids"):
        return "segment ids"
    return "cu_seqlens" if spec.has("cu_seqlens_q") else "whole rows"


def _fits(wanted: Mapping[str, object], facts: _Facts) -> bool:
    for name, value in wanted.items():
        fact = facts[name]
        if not isinstance(value, list):
            if fact != value:
                return False
        elif isinstance(fact, str):
            if fact not in value:
                return False
        elif not value[0] <= fact <= value[1]:
            return False
    return True


@cache
def _table() -> dict[tuple[str, bool], list[Row]]:
    """The rows for an arch and for the forward (False) or the backward pass (True)."""
    return by_arch_and_direction(rows())


def rows() -> list[Row]:
    """The rows of preferences.json, in order."""
    return _file()["rows"]


def losses() -> list[Loss]:
    """The measured calls for which the rows choose an implementation that is not the best."""
    return _file()["losses"]


def _file() -> _File:
    file = resources.files("attn_dispatch.core") / "preferences.json"
    return json.loads(file.read_text())


def by_arch_and_direction(rows: Sequence[Row]) -> dict[tuple[str, bool], list[Row]]:
    """The rows by the facts that all calls of a process have in common."""
    found: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        calls = {**row["calls"]}
        arch, direction = str(calls.pop("arch")), calls.pop("direction", None)
        for name, is_backward in (("forward", False), ("backward", True)):
            if direction in (None, name):
                found.setdefault((arch, is_backward), []).append({**row, "calls": calls})
    return found
