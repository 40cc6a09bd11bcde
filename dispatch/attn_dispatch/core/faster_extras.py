"""The extras (implementations from optional packages) that were measured to be faster than ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import TypedDict

from attn_dispatch.call.features import features_of
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.eligibility import reasons_as_it_is
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Implementation

_SEQUENCES = ("lengths", "segment ids", "cu_seqlens")
_TILE = 128
"""Rows of queries that a kernel's block takes."""


def faster_first(
    implementations: Sequence[Implementation], spec: AttentionSpec, device: Device
) -> tuple[Implementation, ...]:
    """The implementations, best first for this call on this device.

    An extra comes first if it runs the call without rewrites and a row of faster_extras.json
    records that it is faster for such calls. If several do, the first row counts.
    """
    eligible = [
        x
        for x in implementations
        if x.IS_EXTRA
        and x.PLATFORM == device.platform
        and not x.unusable_reason(device)
        and not reasons_as_it_is(x, spec, device)
    ]
    rows = _faster_names(spec, device) if eligible else []
    faster = sorted((x for x in eligible if x.NAME in rows), key=lambda x: rows.index(x.NAME))
    return (*faster, *(x for x in implementations if x not in faster))


def _faster_names(spec: AttentionSpec, device: Device) -> list[str]:
    """The implementations that the table records as faster for such calls, in its order."""
    facts = {
        "arch": device.arch,
        "direction": "backward" if spec.is_backward else "forward",
        "sequences": next((x for x in features_of(spec) if x in _SEQUENCES), "whole rows"),
        "mask_mod": spec.meaning.mask_mod is not None,
        "queries": spec.seq_len_q,
        "tiles": spec.batch * spec.num_heads * -(-spec.seq_len_q // _TILE),
        "keys": spec.seq_len_kv,
        "keys_per_query": spec.seq_len_kv / spec.seq_len_q,
        "queries_per_sequence": spec.seq_len_q / (spec.most_sequences or 1),
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "heads_per_kv_head": spec.num_heads // spec.num_kv_heads,
        "lse_grad": spec.has("lse_grad"),
        "same_head_dims": spec.head_dim == spec.head_dim_v,
    }
    return [row["faster"] for row in _table() if _fits(row["calls"], facts)]


class _Row(TypedDict):
    faster: str
    calls: dict[str, str | bool | list[float]]
    """The facts of the calls: a value, or the least and largest number."""


def _fits(wanted: Mapping[str, str | bool | list[float]], facts: Mapping[str, str | float]) -> bool:
    for name, value in wanted.items():
        fact = facts[name]
        if not isinstance(value, list):
            if fact != value:
                return False
        elif isinstance(fact, str) or not value[0] <= fact <= value[1]:
            return False
    return True


@cache
def _table() -> list[_Row]:
    file = resources.files("attn_dispatch.core") / "faster_extras.json"
    return json.loads(file.read_text())["rows"]
