"""Random calls whose sequences are spread over eight devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.support.spread_calls import Case, Spread

MESHES = (
    {"context": 8},
    {"data": 2, "context": 4},
    {"data": 4, "context": 2},
    {"context": 4, "tensor": 2},
    {"context": 2, "tensor": 4},
    {"data": 2, "context": 2, "tensor": 2},
    {"context_a": 2, "context_b": 4},
    {"data_a": 2, "data_b": 2, "context": 2},
    {"context_a": 2, "tensor": 2, "context_b": 2},
)
_LENGTHS = (("query_seq_lengths",), ("key_value_seq_lengths",))
STRATEGIES = ("auto", "heads", "ring", "gather", "halo")


class Draw:
    """Choices by a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng([abs(seed), int(seed < 0)])

    def one(self, *values: Any) -> Any:
        return values[self._rng.integers(len(values))]

    def may(self, chance: float) -> bool:
        return bool(self._rng.random() < chance)


def drawn(seed: int) -> Case:
    """The case of a seed."""
    draw = Draw(seed)
    spread = _spread(draw)
    data, tensor = spread.ways("data"), spread.ways("tensor")
    kv_heads = draw.one(1, tensor, 2 * tensor) if spread.manual else draw.one(1, 2, 3, 4)
    case = Case(
        spread,
        batch=data * draw.one(1, 1, 2) if data > 1 else draw.one(0, 1, 2),
        rows=draw.one(2, 4, 4, 6, 8) if spread.order == "zigzag" else draw.one(1, 2, 3, 4, 4, 6),
        heads=kv_heads * (draw.one(tensor, 2 * tensor) if kv_heads == 1 else draw.one(1, 2)),
        kv_heads=kv_heads,
        dim=draw.one(4, 8),
        dim_v=draw.one(4, 4, 8),
        seed=seed,
    )  # fmt: skip
    case = _with_documents(Draw(seed + 10**6), _with_options(draw, case))
    case = _with_positions(Draw(-1 - seed), case)
    return _with_whole_rows(Draw(-1 - seed), _with_program(draw, case))


def _spread(draw: Draw) -> Spread:
    mesh = draw.one(*MESHES)
    context = tuple(x for x in mesh if x.startswith("context"))
    manual = draw.one((), (), tuple(mesh), tuple(mesh), context)
    if not manual and draw.may(0.1):
        manual = tuple(x for x in mesh if x.startswith("data"))
    has_argument = bool(set(manual) & set(context))
    return Spread(
        mesh, draw.one("Auto", "Explicit"), manual, draw.one(*STRATEGIES),
        "zigzag" if has_argument and draw.may(0.5) else "contiguous", check_vma=draw.may(0.6),
    )  # fmt: skip


def _with_options(draw: Draw, case: Case) -> Case:
    total = case.size("t")
    options: dict[str, Any] = {}
    further = list[str]()
    kind = draw.one("full", "causal", "causal", "window", "causal window")
    if kind.startswith("causal"):
        options["is_causal"] = True
    if kind == "causal window":
        options["local_window_size"] = (draw.one(1, case.rows, 2 * case.rows, total - 1), 0)
    if kind == "window":
        options["local_window_size"] = (draw.one(1, case.rows), draw.one(0, 0, 1, None))
    keys = draw.one(0, 2 * case.rows) if kind == "full" else 0
    if draw.may(0.35):
        further.append("query_segment_ids")
        if draw.may(0.5):
            options["max_segments"] = 5
        if keys or (kind == "full" and draw.may(0.2)):
            further.append("key_value_segment_ids")
    chances = {"bias": 0.2, "mask": 0.12, "sinks": 0.25, "alibi_slopes": 0.15, "scale": 0.1}
    further += [x for x, chance in chances.items() if draw.may(chance)]
    if draw.may(0.15):
        options["logits_soft_cap"] = 3.0
    if draw.may(0.2) and "scale" not in further:
        options["scale"] = 0.7
    options |= {f"return_{x}": True for x in ("lse", "max_logits") if draw.may(0.3)}
    if draw.may(0.12):
        options["qkv_layout"] = "BNTH"
    shared = tuple(x for x in "bnt" if draw.may(0.4))
    return dataclasses.replace(
        case, options=options, further=tuple(further), shared=shared, keys=keys
    )


def _with_documents(draw: Draw, case: Case) -> Case:
    """The case, perhaps with documents each of which is in zigzag order."""
    if not case.spread.has_argument or not draw.may(0.5):
        return case
    spread = dataclasses.replace(case.spread, order="documents")
    options = dict(case.options)
    for name in ("is_causal", "max_segments", "local_window_size"):
        options.pop(name, None)
    options |= {"is_causal": True} if draw.may(0.9) else {}
    options |= {"max_segments": 5} if draw.may(0.6) else {}
    kept = ("sinks", "scale", "bias") if draw.may(0.1) else ("sinks", "scale")
    further = (*(x for x in case.further if x in kept), "query_segment_ids")
    return dataclasses.replace(
        case, spread=spread, options=options, further=further, keys=0, rows=draw.one(2, 3, 6, 8, 11)
    )


def _with_whole_rows(draw: Draw, case: Case) -> Case:
    """The case, perhaps with a few queries that every device has, and keys that are split."""
    is_layers, is_packed = case.program == "layers", any("segment" in x for x in case.further)
    if case.spread.manual or is_layers or is_packed or not draw.may(0.3):
        return case
    options = dict(case.options)
    if options.get("is_causal") or "local_window_size" in options:
        options["causal_alignment"] = "bottom_right"
    further = tuple(x for x in case.further if x != "query_seq_lengths")
    keys, queries = 4 * case.rows + draw.one(0, 1, 16), draw.one(1, 1, 3)
    return dataclasses.replace(case, keys=keys, queries=queries, options=options, further=further)


def _with_positions(draw: Draw, case: Case) -> Case:
    """The case, perhaps with what no strategy but heads takes."""
    kind = draw.one("dropout", "mask_mod", "score_mod", "offset", "lengths")
    options, further = dict(case.options), case.further
    if not draw.may(0.15):
        return case
    # A device counts heads and batch rows from the first that it has in a shard_map.
    is_shared = {*case.spread.manual} <= {*case.spread.axes("context")}
    if kind == "dropout" and is_shared:
        options |= {"dropout_rate": 0.4, "dropout_key": np.array([1, case.seed], np.uint32)}
    elif kind == "mask_mod":
        options["mask_mod"] = lambda b, n, t, s: (t + is_shared * (n + b)) % 3 >= s % 3
    elif kind == "score_mod":
        options["score_mod"] = lambda x, b, n, t, s: x + 0.1 * t - 0.2 * s + is_shared * 0.3 * n
    elif kind == "offset":
        options["causal_alignment"] = draw.one(-2, 1, case.rows + 1)
    elif case.batch and not any("segment" in x for x in further):
        further = (*further, *draw.one(*_LENGTHS))
    return dataclasses.replace(case, options=options, further=further)


def _with_program(draw: Draw, case: Case) -> Case:
    program = draw.one("call", "call", "call", "vmap", "layers")
    derivative = "jvp" if draw.may(0.08) and program != "layers" else "vjp"
    front = 2 if program == "vmap" or draw.may(0.1) else 0
    if program != "vmap" and any("seq_" in x or "segment" in x for x in case.further):
        front = 0
    changes: dict[str, Any] = {}
    if program == "layers":
        options = {x: y for x, y in case.options.items() if not x.startswith("return_")}
        changes |= {"dim_v": case.dim, "options": options}
    spread = case.spread
    if derivative == "vjp" and spread.manual and spread.check_vma and draw.may(0.3):
        derivative = "inside"
    if front and not case.batch and program != "vmap":
        front = 0
    return dataclasses.replace(case, program=program, derivative=derivative, front=front, **changes)
