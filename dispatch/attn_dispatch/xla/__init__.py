"""Attention in plain XLA: every platform and every option, memory linear in sequence length.

Both directions (forward_pass.py, backward_pass.py) loop over blocks of query rows, each with all
keys, so that long sequences make no [T, S] array. Where batch rows and heads are many, a block
takes only some of them.
"""

from __future__ import annotations

import os

import jax.numpy as jnp

from attn_dispatch.call.operands import is_mod_operand
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import NOTHING, Plan
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.xla.backward_pass import backward
from attn_dispatch.xla.blocks import BlockSizes
from attn_dispatch.xla.forward_pass import formula, forward
from attn_dispatch.xla.paged import keys_bytes, spec_of_part

__all__ = ["backward", "formula", "forward"]

NAME = "xla"
PLATFORM = None
IS_EXTRA = False
KEEPS_NAN_APART = False
DROPS_BY_POSITION = True
HAS_DECODING_KERNEL = False
SKIPS_FROM_BOTTOM_RIGHT = True

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
    """Every reason why this call cannot run on XLA; empty means that it can."""
    return (*broken((_ANY_ORDER,), (spec, device)), *broken(_RULES, spec))


def _sums_in_any_order(call: tuple[AttentionSpec, Device]) -> bool:
    spec, device = call
    if not spec.meaning.deterministic_backward or device.platform == "cpu":
        return False
    is_ordered = "deterministic_ops" in os.environ.get("XLA_FLAGS", "")
    return any(map(is_mod_operand, spec.wanted.gradients)) and not is_ordered


_ANY_ORDER = Rule[tuple[AttentionSpec, Device]](
    "xla/any_order",
    _sums_in_any_order,
    "deterministic_backward: on a GPU XLA adds up the gradients of what score_mod reads in any "
    "order",
    "set XLA_FLAGS=--xla_gpu_deterministic_ops=true in the environment",
)

_RULES = (
    Rule[AttentionSpec](
        "xla/symbolic_length_of_mods",
        lambda s: bool(s.meaning.mods) and s.has_symbolic_length,
        "{mods}: lengths must be known, and one of {symbols} is a symbol in a length of query or "
        "key",
        facts=lambda s: {
            "mods": " and ".join(s.meaning.mods),
            "symbols": ", ".join(s.symbols),
        },
    ),
    Rule[AttentionSpec](
        "xla/symbolic_length_of_packed",
        lambda s: s.is_packed and s.has_symbolic_length,
        "packed sequences (segment ids, cu_seqlens) need lengths that are known, and one of "
        "{symbols} is a symbol in a length of query or key",
        facts=lambda s: {"symbols": ", ".join(s.symbols)},
    ),
    Rule[AttentionSpec](
        "xla/dtype",
        lambda s: s.dtype not in _DTYPES,
        f"dtype must be one of {', '.join(_DTYPES)}, got {{dtype}}",
        "cast query, key and value to bfloat16, multiplied by their scales if they have any",
        facts=lambda s: {"dtype": s.dtype},
    ),
)


def plan(spec: AttentionSpec, device: Device) -> Plan:
    """The blocks, and the bytes of one block's scores; XLA holds a few such arrays at a time."""
    if spec.is_empty:
        return NOTHING
    if spec.is_paged:
        part = spec_of_part(spec)
        number, inner = spec.batch // part.batch, plan(part, device)
        of_parts = f", in {number} parts of {part.batch} batch rows" if number > 1 else ""
        size = keys_bytes(part)
        engine = f"pages gathered{of_parts}; {inner.engine}"
        return Plan(engine, size + inner.workspace_bytes, inner.other_bytes)
    sizes = BlockSizes.of(spec)
    scores = sizes.score_bytes(spec)
    return Plan(sizes.describe(spec), scores, scores + _copies_bytes(spec))


def _copies_bytes(spec: AttentionSpec) -> int:
    """Bytes of the copies, with heads first, that blocks read and write.

    Forward these are query, key, value and out; backward also out_grad, the gradient of query, and
    the gradients of key and value in float32. In 16 bits:

        forward   B · T · N · (H + V) · 2       +  B · S · K · (H + V) · 2
        backward  B · T · N · (2H + 2V) · 2     +  B · S · K · (H + V) · (2 + 4)

    With the scores of two blocks the backward pass takes 0.45 GB at B 16, T 2048, N 8, K 2, H 64;
    XLA allocates 0.54 GB there for both passes (CPU).
    """
    if spec.symbols:
        return 0
    size, wide = (jnp.dtype(x).itemsize for x in (spec.dtype, spec.lse_dtype))
    h, v = spec.head_dim, spec.head_dim_v
    queries = spec.batch * spec.seq_len_q * spec.num_heads
    keys = spec.batch * spec.seq_len_kv * spec.num_kv_heads
    if not spec.is_backward:
        return (queries + keys) * (h + v) * size
    return queries * (2 * h + 2 * v) * size + keys * (h + v) * (size + wide)


def other_engines(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    return ()


def unusable_reason(device: Device) -> str:
    """Empty: XLA runs everywhere."""
    del device
    return ""


def version() -> None:
    """None: XLA comes with jaxlib."""


def library_lines() -> list[str]:
    """Empty: XLA comes with jaxlib."""
    return []
