"""Limits on the sizes of AITER's calls: 32-bit counts of elements and bytes, and grid sizes."""

from __future__ import annotations

import numpy as np

from attn_dispatch.aiter.call import AiterCall

_INT32_MAX = 2**31 - 1

_ROWS_OF_A_TILE, _KEYS_OF_A_TILE = 64, 128  # of CK's split-KV kernels, for most head dims
_COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}
_MAX_SPLITS = 128
FOUR_GIB = 2**32
MOST_BYTES_OF_A_ROW = 2**21
"""From one row to the next, in gfx950's ASM forward kernels. Between it and 4 MiB nothing was
tried."""
MAX_GRID_SIZE = 65_535
"""The most workgroups along y and along z of a grid on AMD; along x it is 2**31 - 1."""
QUERIES_OF_A_TILE = 128  # of CK's forward kernels, where there are many queries


def over_int32(call: AiterCall) -> list[str]:
    """The axes whose stride in elements exceeds int32."""
    return [axis for axis, elements in _strides(call).items() if elements > _INT32_MAX]


def over_4_gib(call: AiterCall) -> list[str]:
    """The arrays whose size in bytes exceeds 32 bits."""
    return [name for name, size in _bytes(call).items() if size >= FOUR_GIB]


def over_grid(call: AiterCall) -> list[str]:
    """The counts that exceed MAX_GRID_SIZE along y or z of a kernel's grid: "70000 heads".

    Each kernel has batch rows, or sequences, along one of these axes: GridSize of
    fmha_fwd_kernel.hpp, fmha_bwd_kernel.hpp (dot_do_o, dq_dk_dv and convert_dq alike),
    fmha_fwd_splitkv_kernel.hpp and fmha_fwd_splitkv_combine_kernel.hpp, and gdx, gdy, gdz of
    hsa/gfx*/fmha_v3_*/codegen.py. The other axis has the heads in backward passes and in split-KV,
    and the tiles of queries in CK's forward pass.
    """
    number = {"sequences" if call.is_group else "batch rows": call.batch}
    if call.backward or call.is_split:
        number["heads"] = call.num_heads
    else:
        tiles = -(-call.max_seq_len_q // QUERIES_OF_A_TILE)
        number[f"tiles of {QUERIES_OF_A_TILE} queries"] = tiles
    return [f"{n} {what}" for what, n in number.items() if n > MAX_GRID_SIZE]


def keys_per_split(call: AiterCall) -> int:
    """The most keys that CK's deterministic backward pass sums in one dq_acc."""
    return 128 if max(call.head_dim, call.head_dim_v) <= 128 else 64  # kN0 of dev18's tiles


def dq_acc_bytes(call: AiterCall) -> int:
    """The bytes that CK's backward pass reaches from one base address in dq_acc.

    They are one batch row; if deterministic, all from this row in the first split to its end in the
    last one.
    """
    row = 4 * call.max_seq_len_q * call.num_heads * call.head_dim
    if not call.deterministic:
        return row
    splits = -(-call.max_seq_len_kv // keys_per_split(call))
    rows = call.seq_len_q * (1 if call.is_group else call.batch)
    return row + (splits - 1) * 4 * rows * call.num_heads * call.head_dim


def splits_of(call: AiterCall, arch: str) -> int:
    """The number of parts into which the split-KV kernels split the keys of each row: 1 to 128.

    The rule is that of AITER's host code (num_splits_heuristic_ck of csrc/include/mha_common.h,
    from FlashAttention-2): with two workgroups per compute unit, it takes the fewest splits that
    leave only slightly more of them idle in the last wave than the best number. AITER passes it
    ceil(head_dim_v / head_dim_v) blocks, that is one, and so never splits; here it gets the number
    of tiles of keys.
    """
    workgroups = call.batch * call.num_heads * -(-call.seq_len_q // _ROWS_OF_A_TILE)
    at_once, blocks = 2 * _COMPUTE_UNITS[arch], -(-call.seq_len_kv // _KEYS_OF_A_TILE)
    if workgroups >= 0.8 * at_once:
        return 1
    efficiency: dict[int, float] = {}
    for splits in range(1, min(_MAX_SPLITS, at_once, blocks) + 1):
        # Skips numbers with as many blocks per split as one split fewer: the last would be empty.
        if splits == 1 or -(-blocks // splits) != -(-blocks // (splits - 1)):
            waves = np.float32(workgroups * splits) / np.float32(at_once)
            efficiency[splits] = float(waves / np.ceil(waves))
    enough = 0.85 * max(efficiency.values())
    return next(splits for splits, x in efficiency.items() if x >= enough)


def _strides(call: AiterCall) -> dict[str, int]:
    """The largest strides of each array in elements, by the axis that has them: "head of lse".

    In group mode only lse has such a stride. Of the other arrays the number is that of elements in
    the longest sequence, because kernels count to its end.
    """
    t, s = (
        (call.max_seq_len_q, call.max_seq_len_kv)
        if call.is_group
        else (call.seq_len_q, call.seq_len_kv)
    )
    of = "sequence" if call.is_group else "batch row"
    strides = {
        f"{of} of query": t * call.num_heads * call.head_dim,
        f"{of} of key": s * call.num_kv_heads * call.head_dim,
        f"{of} of value": s * call.num_kv_heads * call.head_dim_v,
        f"{of} of output": t * call.num_heads * call.head_dim_v,
        "head of lse": call.seq_len_q,
    }
    if call.page_size:
        del strides[f"{of} of key"], strides[f"{of} of value"]
        strides["page of key"] = call.page_size * call.num_kv_heads * call.head_dim
        strides["page of value"] = call.page_size * call.num_kv_heads * call.head_dim_v
    if not call.is_group:
        strides["batch row of lse"] = call.num_heads * t
    if call.bias == "bias":
        strides["head of bias"] = t * s
        strides["batch row of bias"] = call.num_heads * t * s
    if call.backward:
        strides["gradient of key"] = s * call.num_heads * call.head_dim
        strides["gradient of value"] = s * call.num_heads * call.head_dim_v
        if call.has_dbias:
            strides["batch row of bias's gradient"] = t * call.num_heads * s
    return strides


def _bytes(call: AiterCall) -> dict[str, int]:
    batch = 1 if call.is_group else call.batch
    queries, keys = batch * call.seq_len_q, batch * call.seq_len_kv
    sizes = {
        "query": 2 * queries * call.num_heads * call.head_dim,
        "key": 2 * keys * call.num_kv_heads * call.head_dim,
        "value": 2 * keys * call.num_kv_heads * call.head_dim_v,
        "output": 2 * queries * call.num_heads * call.head_dim_v,
        "lse": 4 * queries * call.num_heads,
    }
    if call.backward:
        sizes["gradient of key"] = 2 * keys * call.num_heads * call.head_dim
        sizes["gradient of value"] = 2 * keys * call.num_heads * call.head_dim_v
        sizes["float32 gradient of query"] = 4 * queries * call.num_heads * call.head_dim
    return sizes
