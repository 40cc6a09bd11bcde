"""The forms in which kernels take a mask as data: intervals of keys for each row, or a bit a pair.

Part of export_kernels.py, which makes CUTLASS's DSL ready before it imports this.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from exporting import VECTOR, tensor
from fa4_jax.cute.mask import (
    AttentionMask,
    _cols_match_r2p,
    mask_r2p_lambda,
    r2p_bitmask_above,
    r2p_bitmask_below,
    sm90_col_to_r2p_idx,
)
from fa4_jax.cute.utils import scalar_to_ssa


def _rows_array(batch, heads, rows):
    """Two intervals of keys for each query row: start, length, start, length."""
    return tensor(Int32, (batch, rows, 4), VECTOR)


def _bits_array(batch, heads, rows):
    """A bit for each key of each query row, from the lowest of a word on; 0 past the last key."""
    return tensor(Uint32, (batch, heads, rows, cute.sym_int()), 4)


@cute.jit
def in_rows(batch, head, query, key, info, data):
    """The mask: the key is in one of the row's intervals. One unsigned comparison for each.

    The last tile may have rows past the last, whose results nobody uses. Kernels for sm90 have
    `_apply_rows` in place of it.
    """
    rows = data[0]
    b, k = batch[0], key[0]
    q = cutlass.min(query[0], info.seqlen_q - 1)
    first = Uint32(k - rows[b, q, 0]) < Uint32(rows[b, q, 1])
    second = Uint32(k - rows[b, q, 2]) < Uint32(rows[b, q, 3])
    return scalar_to_ssa(first | second, Boolean)


@cute.jit
def in_bits(batch, head, query, key, info, data):
    """The mask: the key's bit is set. Kernels for sm90 have `_apply_bits` in place of it."""
    bits = data[0]
    b, h, k = batch[0], head[0], key[0]
    q = cutlass.min(query[0], info.seqlen_q - 1)
    word = bits[b, h, q, cutlass.min(k >> 5, bits.shape[3] - 1)]
    is_set = (word >> Uint32(k & 31)) & Uint32(1) != Uint32(0)
    return scalar_to_ssa(is_set & (k < info.seqlen_k), Boolean)


def _words(tile, columns, key_axis):
    """The words of a row that a thread reads: the place of the first bit of each, and the columns
    whose bits it has, as (column, bit), with places counted from the thread's first column.

    A word is whole if threads and tiles begin at whole words, and else half a word. Within that, a
    thread's place moves no column to another word: all columns of threads at 0, 2, 4 and 6 are at
    0 or 1 of 8, and those of threads at 0 to 7 at 0.
    """
    places = [columns[0, x][key_axis] for x in range(cute.size(columns.shape[1]))]
    extent = places[-1] // 8 * 8 + 8
    assert tile.tile_n % 16 == 0 and extent % 16 == 0
    width = 32 if tile.tile_n % 32 == 0 and extent % 32 == 0 else 16
    words = {}
    for column, place in enumerate(places):
        words.setdefault(place // width * width, []).append((column, place % width))
    return tuple(words.items())


@cute.jit
def _apply_bits(
    tile, scores, places, columns, axes, first_key, batch, head, m_block, n_block, data
):
    """Applies bits to a tile of pairs, of which a thread has some rows and columns.

    A word is loaded once for all its columns of a row. The last tile may have rows past the last,
    whose results nobody uses, and keys past the last, which the mask hides.
    """
    bits = data.tensors[0]
    count = bits.shape[3]
    for row in cutlass.range_constexpr(cute.size(places.shape[0])):
        query = cutlass.min(places[row, 0][axes[0]] + m_block * tile.tile_m, tile.seqlen_q - 1)
        for first, group in _words(tile, columns, axes[1]):
            place = n_block * tile.tile_n + first_key + first
            index = place >> 5
            word = bits[batch, head, query, cutlass.min(index, count - 1)]
            word = (word if index < count else Uint32(0)) >> Uint32(place & 31)
            for column, bit in group:
                is_seen = (word & Uint32(1 << bit)) != Uint32(0)
                scores[row, column] = scores[row, column] if is_seen else -Float32.inf


@cute.jit
def _hide_by_words(scores, start, end, other_start, other_end):
    """Hides scores of a row outside of [start, end) and [other_start, other_end), by a bit each.

    A thread has columns 0, 1, 8, 9, 16, ... of the row, and the limits count from column 0.
    """
    start, end = sm90_col_to_r2p_idx(start), sm90_col_to_r2p_idx(end)
    other_start, other_end = sm90_col_to_r2p_idx(other_start), sm90_col_to_r2p_idx(other_end)

    def seen(word):
        first = r2p_bitmask_above(start, word) & r2p_bitmask_below(end, word)
        second = r2p_bitmask_above(other_start, word) & r2p_bitmask_below(other_end, word)
        return first | second

    mask_r2p_lambda(scores, seen, rank1=True)


@cute.jit
def _apply_rows(
    tile, scores, places, columns, axes, first_key, batch, head, m_block, n_block, data
):
    """Applies intervals to a tile of pairs, of which a thread has some rows and columns.

    A row's intervals are loaded once. The last tile may have rows past the last, whose results
    nobody uses.
    """
    first = n_block * tile.tile_n + first_key
    ranges = cute.make_rmem_tensor(4, Int32)
    for row in cutlass.range_constexpr(cute.size(places.shape[0])):
        query = cutlass.min(places[row, 0][axes[0]] + m_block * tile.tile_m, tile.seqlen_q - 1)
        cute.autovec_copy(data.tensors[0][batch, query, None], ranges)
        # Not by unsigned comparisons: the DSL compares numbers from registers as signed ones.
        start, other_start = ranges[0] - first, ranges[2] - first
        end, other_end = start + ranges[1], other_start + ranges[3]
        if cutlass.const_expr(_cols_match_r2p(columns, axes[1])):
            _hide_by_words(scores[row, None], start, end, other_start, other_end)
        else:
            for column in cutlass.range_constexpr(cute.size(columns.shape[1])):
                key = columns[0, column][axes[1]]
                is_seen = (start <= key) & (key < end) | (other_start <= key) & (key < other_end)
                scores[row, column] = scores[row, column] if is_seen else -Float32.inf


def _apply(
    self, scores, places, columns, row_axis, key_axis, first_key, batch, head, m_block, n_block,
    checks_lengths, mask, data, divisors,
):  # fmt: skip
    """Applies the mask to a tile of pairs. In some tiles, the package divides both indices by the
    lengths, so that no mask reads past its arrays: two divisions for each pair. Ours clip them."""
    tile = (scores, places, columns)
    rest = (first_key, batch, head, m_block, n_block)
    apply = _apply_bits if mask is in_bits else _apply_rows
    apply(self, *tile, (row_axis, key_axis), *rest, data)


AttentionMask.apply_mask_mod_sm80 = _apply

ROWS_FORM, BITS_FORM = (in_rows, _rows_array), (in_bits, _bits_array)
"""The forms: the function of a pair, and the array of a batch, its heads and query rows."""
