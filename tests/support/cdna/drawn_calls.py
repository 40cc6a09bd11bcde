"""Random calls that ASM kernels run: dense, with lengths, packed, and of segments with gaps."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from attn_dispatch_tools.verify.case import Case
from tests.support.cdna import generations
from tests.support.cdna.cases import CAUSAL, TOP_LEFT, case
from tests.support.cdna.kernel_calls import OURS, kernels_of
from tests.support.cdna.kernel_runs import KernelRun
from tests.support.cdna.kernels import MI300

Facts = dict[str, Any]
_MOST_SCORES = 700_000
"""The most work of a call: batch · heads · queries · keys."""


def drawn_run(generation: str, arch: str, seed: int) -> KernelRun:
    """A call of which AITER's dispatch runs the forward pass or the backward pass on ASM."""
    for attempt in itertools.count():
        random = np.random.default_rng([seed, attempt, len(generation), int(arch[3:])])
        call = _drawn(random, f"{generation} {arch} {seed}")
        if call.b * call.n * call.t * call.s > _MOST_SCORES:
            continue
        with generations.planned(generation):
            if kernels_of(call, generation, arch, OURS):
                return KernelRun(generation, arch, call, OURS, MI300, ())
    raise AssertionError


def _drawn(random: np.random.Generator, name: str) -> Case:
    h, v = _one_of(random, ((64, 64), (128, 128), (128, 128), (104, 104), (192, 192), (192, 128)))
    kv_heads, groups = _one_of(random, ((1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 8)))
    mask = _one_of(random, (TOP_LEFT, CAUSAL, CAUSAL, {}, {}, _window(random)))
    facts = _one_of(random, (_dense, _dense, _with_lengths, _packed, _packed, _of_segments))(random)
    facts |= {"lse_grad": bool(random.integers(4) == 0)}
    return case(
        name, k=kv_heads, n=kv_heads * groups, h=h, v=v, scale=float(random.choice((0.05, 0.2))),
        dtype=_one_of(random, ("bfloat16", "bfloat16", "float16")), **facts, **mask,
    )  # fmt: skip


def _one_of(random: np.random.Generator, choices: Any) -> Any:
    return choices[random.integers(len(choices))]


def _length(random: np.random.Generator) -> int:
    """A length, now and then near a tile's, or much longer than others."""
    near = int(_one_of(random, (64, 128, 192, 256, 512)) + random.integers(-1, 2))
    return _one_of(random, (int(random.integers(1, 300)), int(random.integers(1, 1200)), near))


def _window(random: np.random.Generator) -> Facts:
    left, right = (int(x) for x in random.integers(0, 200, 2))
    return {"window": (left, right), "alignment": _one_of(random, ("top_left", "bottom_right"))}


def _dense(random: np.random.Generator) -> Facts:
    return {"b": int(random.integers(1, 4)), "t": _length(random), "s": _length(random)}


def _with_lengths(random: np.random.Generator) -> Facts:
    """Lengths of queries and keys, some of them 0."""
    b, t, s = 3, _length(random), _length(random)
    lengths = [tuple(_some_zero(random, random.integers(1, x + 1, b))) for x in (t, s)]
    return {"b": b, "t": t, "s": s, "q_lengths": lengths[0], "kv_lengths": lengths[1]}


def _some_zero(random: np.random.Generator, lengths: np.ndarray) -> list[int]:
    return [0 if random.integers(5) == 0 else int(x) for x in lengths]


def _packed(random: np.random.Generator) -> Facts:
    """Sequences one after the other, some without queries or without keys."""
    number = int(random.integers(1, 6))
    sides = [_some_zero(random, random.integers(1, 400, number)) for _ in range(2)]
    starts = [tuple(np.concatenate(([0], np.cumsum(x))).tolist()) for x in sides]
    t, s = (max(x[-1], 1) for x in starts)
    return {
        "t": t, "s": s, "cu_q": (starts[0],), "cu_kv": (starts[1],),
        "longest": tuple(max(1, *x) for x in sides),
    }  # fmt: skip


def _of_segments(random: np.random.Generator) -> Facts:
    """Ids with padding before, between and after the segments."""
    number, b = int(random.integers(1, 4)), int(random.integers(1, 3))
    t, s = (int(x) for x in random.integers(150, 500, 2))
    rows = {"q_segments": t, "kv_segments": s}
    ids = {x: tuple(_ids(random, number, n) for _ in range(b)) for x, n in rows.items()}
    return {"b": b, "t": t, "s": s, "max_segments": number, **ids}


def _ids(random: np.random.Generator, number: int, length: int) -> tuple[int, ...]:
    """Ascending ids of which each begins and ends at places of its own."""
    places = np.sort(random.integers(0, length + 1, 2 * number))
    ids = np.zeros(length, int)
    for n in range(number):
        ids[places[2 * n] : places[2 * n + 1]] = n + 1
    return tuple(ids.tolist())
