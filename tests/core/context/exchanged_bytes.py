"""Prints the bytes that exchanging heads sends in the forward pass: of a program, and modelled.

It needs eight devices, which a CPU has only if the process is started so.
"""

from __future__ import annotations

import json
import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from attn_dispatch import dot_product_attention
from attn_dispatch.core.context.cost import Devices, Hardware, SpreadCall
from attn_dispatch.core.context.hardware import H100, NVLINK_4
from attn_dispatch.core.context.strategy_costs import cost

LENGTH, DIM = 1024, 64


def sent(text: str, devices: int) -> float:
    """The bytes that a device sends in all-to-alls of float32: what it keeps is not sent."""
    total = 0
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        result, found, _ = line.partition(" all-to-all(")
        if found:
            shapes = re.findall(r"f32\[([\d,]+)\]", result)
            total += sum(4 * math.prod(map(int, shape.split(","))) for shape in shapes)
    return total * (devices - 1) / devices


def main() -> None:
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("cp",))
    rows = NamedSharding(mesh, PartitionSpec(None, "cp"))
    program = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True))
    found = []
    for heads, kv_heads in ((16, 8), (64, 8)):
        arrays = (
            jax.ShapeDtypeStruct((1, LENGTH, x, DIM), jnp.float32, sharding=rows)
            for x in (heads, kv_heads, kv_heads)
        )
        text = program.lower(*arrays).compile().as_text()
        assert text is not None
        call = SpreadCall(1, LENGTH, LENGTH, heads, kv_heads, DIM, DIM, width=4)
        modelled = cost("heads", call, Hardware(Devices(devices), NVLINK_4, H100)).forward
        assert modelled is not None
        found.append((sent(text, devices), modelled.sent))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
