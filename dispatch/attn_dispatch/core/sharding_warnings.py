"""Warnings, once each, about sharded calls that cost devices more than their share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from attn_dispatch import settings
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import call_warnings
from attn_dispatch.core.context import whole_rows
from attn_dispatch.core.context.strategies import STRATEGIES, Spread, reasons
from attn_dispatch.core.device_share import axes_lost, received_bytes
from attn_dispatch.core.mesh_axes import name_of
from attn_dispatch.core.shards import OF_KV_HEADS, Shards
from attn_dispatch.reason import Rule, broken, sentences
from attn_dispatch.text import in_units
from attn_dispatch.warning import AttentionShardingWarning, warn_once


@dataclass(frozen=True)
class SplitCall:
    """A call and how it is split."""

    call: LeadingCall
    shards: Shards
    specs: Mapping[str, P]
    """How query and the operands that have kv heads are sharded before."""
    left_out: tuple[str, ...] = ()
    """In a shard_map over some axes: others that would split the call outside of it."""

    @property
    def lost(self) -> dict[str, dict[str, str]]:
        """Each operand with kv heads that is gathered, and the mesh axes along which it is.

        An axis has the letter of the dim that it splits. Those along which query is gathered too
        are left out.
        """
        unused = {*dict(self.shards.unused), *self.left_out}
        found = {
            name: {
                axis: letter
                for axis, letter in axes_lost(self.shards, self.call, name, spec).items()
                if axis not in unused
            }
            for name, spec in self.specs.items()
            if name in OF_KV_HEADS
        }
        return {name: axes for name, axes in found.items() if axes}


def warn_of_costs(split: SplitCall) -> None:
    """Warn of all that a call costs beyond the share of each device."""
    for reason in broken(_RULES, split):
        _warn(reason.with_remedy, split.call.spec)


def warn_left_to_xla(spec: AttentionSpec, others: AbstractMesh | None, *, is_export: bool) -> None:
    """Warn that XLA alone splits a call, which is exported or lowered for devices elsewhere.

    Args:
      spec: the call.
      others: in a shard_map over some axes of the mesh: the others.
      is_export: whether it is exported.
    """
    how = (
        "is exported from a program sharded along Auto mesh axes: how to split the call cannot be "
        "put into the export."
        if is_export
        else "is lowered for more devices than this process has, along Auto mesh axes: how to "
        "split the call cannot be put into the program."
    )
    alike = ""
    if others is not None:
        axes = ", ".join(map(repr, others.axis_names))
        alike = f"; all {others.size} devices along {axes} compute the same"
    _warn(
        f"attention {how} XLA splits it in its own way, and gathers the operands of GPU kernels"
        f"{alike}. With Explicit axes, or inside a shard_map over all axes, each device keeps its "
        "share",
        spec,
    )


def _warn(text: str, spec: AttentionSpec) -> None:
    """Warn where the call was made; a call and its backward call get one warning."""
    forward = call_warnings.forward_of(spec)
    line = call_warnings.line_of(spec.options)
    warn_once(f"{text}\n  call: {forward}", AttentionShardingWarning, line)


def _unused(split: SplitCall) -> dict[str, object]:
    return {
        "axes": _named(split.shards, [axis for axis, _ in split.shards.unused]),
        "heads": split.call.spec.num_heads,
        "batch": split.call.spec.batch,
        "received": in_units(received_bytes(split.shards, split.call, split.specs)),
        "why": _why_rows_cannot_stay(split),
    }


def _why_rows_cannot_stay(split: SplitCall) -> str:
    if settings.current().context_parallel == "heads":
        return 'context_parallel is "heads"'
    devices = split.shards.ways(tuple(axis for axis, _ in split.shards.unused))
    spread = Spread.of(split.call.spec, devices, split.shards.order)
    if spread is None:
        return "the devices do not divide its rows and keys"
    why = dict.fromkeys(x for name in STRATEGIES for x in reasons(name, spread))
    return sentences(why) or "these axes are not in the order of the mesh"


def _left_out(split: SplitCall) -> dict[str, object]:
    shards = split.shards
    parts = shards.ways((*sum(shards.leading, ()), *shards.heads))
    part = "all" if parts == 1 else f"1/{parts}"
    return {"part": part, "ways": parts * shards.ways(split.left_out)}


_ALONG = {
    "s": "their length", "p": "the number of pages", "e": "the rows of a page", "k": "their heads",
    "h": "the head dim", "v": "the head dim",
}  # fmt: skip
"""The dims of operands with kv heads, by their letters in shards.py; others are of the batch."""


def _lost(split: SplitCall) -> dict[str, object]:
    lost = split.lost
    letters = [letter for axes in lost.values() for letter in axes.values()]
    received = received_bytes(split.shards, split.call, {x: split.specs[x] for x in lost})
    return {
        "arrays": " and ".join(lost),
        "are": "are" if len(lost) > 1 else "is",
        "along": " and ".join(dict.fromkeys(_ALONG.get(x, "the batch") for x in letters)),
        "axes": _named(split.shards, [axis for axes in lost.values() for axis in axes]),
        "received": in_units(received),
        "why": why_keys_move(split),
    }


def why_keys_move(split: SplitCall) -> str:
    """Why devices gather keys or pages, and do not attend from all rows to their own ones.

    In parentheses, after a space; empty if they gather none, or something else is the cause.
    """
    shards, lost = split.shards, split.lost
    letters = {letter for axes in lost.values() for letter in axes.values()}
    axes = {axis for of_one in lost.values() for axis in of_one}
    if letters not in ({"s"}, {"p"}) or axes & set(shards.heads):
        return ""
    if settings.current().context_parallel == "heads":
        return ' (context_parallel is "heads")'
    if axes & set(sum(shards.leading, ())):
        return " (the batch is split along them)"
    batch, devices = shards.ways(sum(shards.leading, ())), shards.ways(tuple(axes))
    found = sentences(whole_rows.reasons(split.call.spec, devices, batch))
    return f" ({found})" if found else ""


def _can_stay(split: SplitCall, axes: tuple[str, ...]) -> bool:
    """Whether a ring along these axes can run the call."""
    spread = Spread.of(split.call.spec, split.shards.ways(axes), split.shards.order)
    return spread is not None and not reasons("ring", spread)


def _remedy_for_lost(split: SplitCall) -> str:
    shards, spec, lost = split.shards, split.call.spec, split.lost
    axes = {axis: letter for of_one in lost.values() for axis, letter in of_one.items()}
    own_heads = spec.num_kv_heads // shards.ways(shards.kv_heads)
    if any(axis in shards.groups for axis in axes):  # they split query heads, not kv heads
        few = f"along an axis of at most {own_heads} devices, kv heads are exchanged instead"
        ways = [few] if own_heads > 1 else []
        if set(axes.values()) == {"s"} and _can_stay(split, tuple(axes)):
            ways.append('context_parallel("ring") leaves rows and keys where they are')
        return "; ".join(ways)
    arrays = " and ".join(lost)
    remedies: list[str] = []
    if own_heads % shards.ways(tuple(axes)) == 0:
        remedies.append(f"shard {arrays} along kv heads")
    if spec.is_paged:
        remedies.append("give each device its own pool in a shard_map, as docs/serving.md does")
    elif set(axes.values()) == {"s"}:
        remedies.append(
            "let each device attend to its own keys in a shard_map and merge the results by lse, "
            "as docs/meshes.md does"
        )
    return ", or ".join(remedies)


_RULES = (
    Rule[SplitCall](
        "sharding/query",
        lambda x: bool(x.shards.unused),
        "query is sharded along {axes}: neither its {heads} heads nor its batch of {batch} divide "
        "further, and its rows cannot stay where they are ({why}). Each device gathers {received} "
        "of query, key and value, and those along that axis compute the same",
        facts=_unused,
    ),
    Rule[SplitCall](
        "sharding/partly_manual",
        lambda x: bool(x.left_out),
        "in a shard_map over some mesh axes, devices along the others cannot sum gradients that "
        "they share: each device computes {part} of the call, where 1/{ways} would be its share",
        remedy="make the shard_map manual over all axes, or the others Explicit",
        facts=_left_out,
    ),
    Rule[SplitCall](
        "sharding/keys",
        lambda x: bool(x.lost),
        "{arrays} {are} sharded along {along} by {axes}, and each device gathers {received} of "
        "them in every call{why}",
        remedy=_remedy_for_lost,
        facts=_lost,
    ),
)


def _named(shards: Shards, axes: Sequence[str]) -> str:
    """Mesh axes by the names that the user gave, each with its number of devices."""
    sizes, devices = dict(shards.sizes), dict[str, int]()
    for axis in dict.fromkeys(axes):
        devices[name_of(axis)] = devices.get(name_of(axis), 1) * sizes[axis]
    return ", ".join(f"{name!r} ({size} devices)" for name, size in devices.items())
