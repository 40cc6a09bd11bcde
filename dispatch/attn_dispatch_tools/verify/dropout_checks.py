"""Checks of the dropout mask of an implementation, returned by it or inferred from outputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.reference import Operands, attended

_UNLIKELY = 1e-8

_DISTANCES = {
    "batch rows": range(1, 4),
    "heads": range(1, 16),
    "rows": (1, 2, 4, 8, 16, 32, 64, 128),
    "keys": (1, 2, 4, 8, 16, 32, 64, 128),
}
"""The axes of the mask along which entries are compared, and the distances between them."""
_MAX_DEVIATIONS = 7
_MIN_VARIANCE = 25
"""A sum of products with a smaller variance is not near enough to a normal distribution to be
judged."""

Draw = Callable[[Operands], np.ndarray]
"""Returns the dropout mask, bool [B, N, T, S], of a call with these operands; True = kept."""


def probe(forward: Callable[[Operands], np.ndarray], case: Case) -> Draw:
    """A `Draw` that infers the mask from the output of `forward`.

    If all scores are equal and the values of V keys at a time are the unit vectors, the output
    shows which of those keys were kept.
    """

    def draw(operands: Operands) -> np.ndarray:
        operands = dict(operands)
        operands["query"] = np.zeros_like(operands["query"])
        operands["key"] = np.zeros_like(operands["key"])
        if "bias" in operands:
            operands["bias"] = np.where(operands["bias"] == -np.inf, -np.inf, 0).astype(
                operands["bias"].dtype
            )
        for name in ("alibi_slopes", "sinks"):  # a sink of 300 would leave the keys no weight
            if name in operands:
                operands[name] = np.zeros_like(operands[name])
        keep = np.zeros((case.b, case.n, case.t, case.s), bool)
        for first in range(0, case.s, case.v):
            columns = np.arange(min(case.v, case.s - first))
            value = np.zeros((case.b, case.s, case.k, case.v), jnp.dtype(case.dtype))
            value[:, first + columns, :, columns] = 1
            out = np.asarray(forward(operands | {"value": value}), np.float32)
            kept = np.moveaxis(out[..., : len(columns)] != 0, 1, 2)
            keep[..., first : first + len(columns)] = kept
        return keep

    return draw


def check(
    case: Case, draw: Draw, operands: Operands, rows_per_number: int = 1
) -> tuple[np.ndarray, list[str]]:
    """The mask of a case, and failures of its rate or of its independence.

    Args:
      rows_per_number: n, the number of rows that share each random number. Of 2n consecutive rows,
        the n even ones share a number and so do the n odd ones.
    """
    keep = draw(operands)
    pairs = attended(case.forward_options(), operands)
    failures = []
    if not np.array_equal(keep & pairs, draw(operands) & pairs):
        failures.append("the same dropout key dropped other entries the second time")
    failures += _other_keys(case, draw, operands, keep, pairs, rows_per_number)
    failures += _not_independent(case, keep, pairs, rows_per_number)
    own = pairs[: _batch_of_one_copy(case)]
    dropped, count = float((~keep[: len(own)] & own).sum()), int(own.sum())
    rate = case.dropout
    if _chance_of(dropped / max(count, 1), rate, count / rows_per_number) < _UNLIKELY:
        failures.append(f"dropped {dropped:.0f} of {count} entries, expected a share of {rate:g}")
    return keep, failures


def _other_keys(
    case: Case,
    draw: Draw,
    operands: Operands,
    keep: np.ndarray,
    pairs: np.ndarray,
    rows_per_number: int,
) -> list[str]:
    """Failures if changing a word of a dropout key leaves the mask of its batch rows unchanged, or
    changes that of others."""
    failures = []
    keys = operands["dropout_key"]
    rows = case.b // keys.shape[0]
    for d, word in np.ndindex(keys.shape):
        other = keys.copy()
        other[d, word] ^= np.uint32(0x5BD1E995)
        changed = draw(operands | {"dropout_key": other}) != keep
        own = np.zeros_like(pairs)
        own[d * rows : (d + 1) * rows] = True
        can_tell = _can_tell(case, pairs & own, rows_per_number)
        if can_tell and not (changed & pairs & own).any():
            failures.append("a changed dropout key dropped the same entries")
        if keys.shape[0] > 1 and (changed & pairs & ~own).any():
            failures.append("a changed dropout key changed the mask of another key's batch rows")
    return list(dict.fromkeys(failures))


def _not_independent(
    case: Case, keep: np.ndarray, pairs: np.ndarray, rows_per_number: int = 1
) -> list[str]:
    """Failures where dropped entries depend on dropped entries elsewhere.

    Heads, batch rows of one key, and rows and keys at some distances are compared.
    """
    failures = []
    common = pairs[:, 1:] & pairs[:, :-1]
    can_tell = _can_tell(case, common, rows_per_number)
    if can_tell and not ((keep[:, 1:] != keep[:, :-1]) & common).any():
        failures.append("all heads drop the same entries")
    part = _batch_of_one_copy(case)
    common = pairs[1:] & pairs[:-1]
    common[part - 1 :: part] = False
    can_tell = _can_tell(case, common, rows_per_number)
    if can_tell and not ((keep[1:] != keep[:-1]) & common).any():
        failures.append("all batch rows drop the same entries")
    dropped = np.where(pairs, ~keep - case.dropout, 0)[:part]
    for axis, (what, distances) in enumerate(_DISTANCES.items()):
        for distance in (x for x in distances if x < dropped.shape[axis]):
            if what == "rows" and 1 < distance < 2 * rows_per_number:
                continue
            deviations = _deviations(case, dropped, pairs[:part], axis, distance, rows_per_number)
            if abs(deviations) > _MAX_DEVIATIONS:
                failures.append(
                    f"{what} {distance} apart do not drop independently: {deviations:+.1f} "
                    "standard deviations"
                )
    return failures


def _deviations(
    case: Case,
    dropped: np.ndarray,
    pairs: np.ndarray,
    axis: int,
    distance: int,
    rows_per_number: int,
) -> float:
    """The deviation from independence of entries at this distance, in standard deviations.

    Args:
      dropped: 1 where an entry is dropped, minus the rate; 0 where there is no pair.
    """
    here, there = np.arange(distance, pairs.shape[axis]), np.arange(pairs.shape[axis] - distance)
    products = float((dropped.take(here, axis) * dropped.take(there, axis)).sum())
    count = int((pairs.take(here, axis) & pairs.take(there, axis)).sum())
    # Rows that share a random number have equal products. Those of consecutive rows repeat most.
    repeats = 2 * rows_per_number - 1
    variance = count / repeats * (case.dropout * (1 - case.dropout)) ** 2
    return products / repeats / math.sqrt(variance) if variance >= _MIN_VARIANCE else 0.0


def _batch_of_one_copy(case: Case) -> int:
    """The batch size of one mapped call; mapped calls share a key, and so draw the same masks."""
    return case.b // (case.mapped if case.transform in ("vmap", "scan") else 1)


def _chance_of(share: float, rate: float, count: float) -> float:
    """An upper bound on the probability of so large a difference from the rate (Chernoff)."""
    # Some kernels draw 8 bits: the rate is right to 1/256.
    difference = max(abs(share - rate) - 1 / 256, 0.0)
    share = rate + math.copysign(difference, share - rate)
    terms = ((share, rate), (1 - share, 1 - rate))
    return math.exp(-count * sum(x * math.log(x / y) for x, y in terms if x > 0))


def _can_tell(case: Case, pairs: np.ndarray, rows_per_number: int) -> bool:
    """Whether there are so many pairs that two masks cannot agree on all of them by chance."""
    count = int(pairs.sum()) / rows_per_number
    return (1 - 2 * case.dropout * (1 - case.dropout)) ** count < _UNLIKELY
