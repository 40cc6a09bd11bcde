"""The strategy of a call under `context_parallel("auto")`: the one with the least modelled time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attn_dispatch.call.context import Strategy
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.context.cost import Cost, Devices, Hardware, SpreadCall, choose
from attn_dispatch.core.context.hardware import H100, INFINITY_FABRIC, MI300X, NVLINK_4
from attn_dispatch.core.context.strategies import STRATEGIES, Spread, all_reasons
from attn_dispatch.core.context.strategy_costs import costs
from attn_dispatch.devices.target import default_device

_NODE = 8
_TYPICAL_DOCUMENTS = 8
"""Documents in a packed sequence whose longest one is not declared."""


def modelled(
    spec: AttentionSpec, spread: Spread, *, batch_ways: int = 1, head_ways: int = 1
) -> list[Cost]:
    """The costs of all strategies for a call, or why they do not apply.

    Args:
      spec: the whole call.
      spread: how rows and keys are spread.
      batch_ways: the number of devices that split the batch, by other mesh axes.
      head_ways: the number of devices that split the heads, by other mesh axes.
    """
    longest = None
    if spec.is_packed:
        longest = spec.longest_sequences[1]
        if spec.meaning.max_seq_lens is None:
            longest = max(1, spec.seq_len_kv // _TYPICAL_DOCUMENTS)
    call = SpreadCall(
        batch=max(1, spec.batch // batch_ways),
        queries=spec.seq_len_q,
        keys=spec.seq_len_kv,
        heads=max(1, spec.num_heads // head_ways),
        kv_heads=max(1, spec.num_kv_heads // head_ways),
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        width=4 if spec.dtype in ("float32", "float64") else 2,
        is_causal=spread.is_causal,
        window=spec.meaning.window[0],
        longest=longest,
        order=spread.order,
    )
    refused = all_reasons(replace(spread, heads=call.heads))
    return costs(call, hardware(spread.devices), refused)


def hardware(devices: int) -> Hardware:
    """So many devices like the ones that the program is for, in nodes of 8."""
    node = _NODE if devices % _NODE == 0 else devices
    if default_device().platform == "rocm":
        return Hardware(Devices.of(devices, node), INFINITY_FABRIC, MI300X)
    return Hardware(Devices.of(devices, node), NVLINK_4, H100)


def cheapest(found: Iterable[Cost]) -> Strategy | None:
    """The strategy with the least modelled time; None if that exchanges heads."""
    best = choose(found)
    return next((x for x in STRATEGIES if best is not None and x == best.strategy), None)
