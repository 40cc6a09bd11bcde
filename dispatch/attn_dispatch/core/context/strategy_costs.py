"""The costs of each strategy, derived from what it sends and computes, and the cheapest one.

P devices hold 1 / P of the rows and keys each. Per device and pass, of its own shares:

    strategy  forward sends                  backward sends                        hidden
    heads     (q + k + v + out) (P - 1) / P  twice that                            nothing
    gather    (k + v) (P - 1)                that, and (dk + dv) (P - 1), float32  nothing
    ring      (k + v) (P - 1)                that, dk + dv, and                    behind kernels
                                             (dk + dv) (P - 2), float32
    halo      k + v of the window (P - 1)/P  twice that                            nothing

(Ulysses, arXiv:2309.14509; Llama 3, arXiv:2407.21783; ring, arXiv:2310.01889.) heads+ring exchanges
heads within groups, and sends keys around rings of one device from each group (arXiv:2405.07719).
Heads are exchanged anew in the backward pass: a program without remat may keep q, k, v and out as
exchanged, and then sends half of that. With fewer kv heads than devices, keys and values are
gathered and their gradients summed by an all-reduce. lse is not counted: it is 1 / 64 of out. A
strategy whose order of rows is not that of the call first exchanges rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from attn_dispatch.call.context import Strategy
from attn_dispatch.call.options import Meaning
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.context.cost import (
    H100,
    INFINITY_FABRIC,
    MI300X,
    NVLINK_4,
    PACKED_RINGS,
    TILE,
    Cost,
    Devices,
    Hardware,
    Pass,
    SpreadCall,
    choose,
)
from attn_dispatch.core.context.strategies import STRATEGIES, Spread, all_reasons
from attn_dispatch.devices.target import default_device
from attn_dispatch.reason import Reason, Rule, broken

_BACKWARD_WORK = 2.5
"""Five products, of two in the forward pass (FlashAttention-2, arXiv:2307.08691)."""

_WITH_LENGTHS = 1.5
"""The time of backward kernels whose keys are cut off by lengths, which a causal gather uses, over
that of kernels without: measured on two H200s, 131,072 tokens."""

_NODE = 8
_TYPICAL_DOCUMENTS = 8
"""Documents in a packed sequence whose longest one is not declared."""


@dataclass(frozen=True)
class _Case:
    call: SpreadCall
    hardware: Hardware
    is_backward: bool = False

    @property
    def number(self) -> int:
        return self.hardware.devices.number

    @property
    def flops(self) -> float:
        """The operations of one device if all have the same."""
        return self.call.work / self.number * (_BACKWARD_WORK if self.is_backward else 1)

    @property
    def rows(self) -> float:
        """Bytes of a device's arrays of rows: q and out, and their gradients."""
        both = (self.call.query_bytes + self.call.out_bytes) / self.number
        return both * (2 if self.is_backward else 1)

    @property
    def keys(self) -> float:
        """Bytes of a device's keys and values, and their gradients in the call's dtype."""
        return self.call.kv_bytes / self.number * (2 if self.is_backward else 1)

    def kernels(self, flops: float) -> float:
        """The seconds of kernels."""
        chip = self.hardware.chip
        return flops / (chip.backward if self.is_backward else chip.forward)

    def copies(self, moved: float) -> float:
        """The seconds of reading and writing so many bytes of a device's memory."""
        return moved / self.hardware.chip.memory


def all_to_all(sent: float, hardware: Hardware, group: Devices | None = None) -> float:
    """The seconds in which every device sends `sent` bytes, an equal part to each device.

    Transfers within and between nodes go on at the same time.
    """
    devices, links = group or hardware.devices, hardware.links
    others = max(devices.number - 1, 1)
    within = sent * (devices.per_node - 1) / others / links.within
    between = sent * (devices.number - devices.per_node) / others / links.between
    return max(within, between) + links.latency * math.ceil(math.log2(devices.number))


def all_gather(share: float, hardware: Hardware) -> float:
    """The seconds until every device has the `share` bytes of all.

    A node receives the shares of all others once, each of its devices an equal part of them, and
    hands them on within the node. A reduce-scatter is the same backwards.
    """
    devices, links = hardware.devices, hardware.links
    within = share * (devices.number - 1) / links.within if devices.per_node > 1 else 0.0
    others = devices.number - devices.per_node
    between = share * others / devices.per_node / links.between
    return max(within, between) + links.latency * math.ceil(math.log2(devices.number))


def hop(sent: float, hardware: Hardware) -> float:
    """The seconds in which every device sends `sent` bytes to the next one.

    All wait for the slowest: across nodes, if there are several.
    """
    links = hardware.links
    return sent / (links.between if hardware.devices.nodes > 1 else links.to_one) + links.latency


def _heads(case: _Case) -> Pass:
    """All-to-all of all arrays before and after the kernel, and local transposes around each."""
    call, number = case.call, case.number
    if call.kv_heads % number == 0:
        return _exchanged(case, case.rows + case.keys)
    total, shares = _exchanged(case, case.rows), call.kv_bytes * (number - 1) / number
    exposed = all_gather(call.kv_bytes / number, case.hardware)
    memory = call.kv_bytes
    if case.is_backward:  # an all-reduce sends as much as a reduce-scatter and a gather
        sums = call.kv_gradient_bytes
        shares += 2 * sums * (number - 1) / number
        exposed += 2 * all_gather(sums / number, case.hardware)
        memory += sums
    return replace(
        total, sent=total.sent + shares, exposed=total.exposed + exposed, gathered=memory
    )


def _exchanged(case: _Case, moved: float) -> Pass:
    """The device's share of kernels, and an all-to-all of `moved` bytes in all."""
    sent = moved * (case.number - 1) / case.number
    compute = case.kernels(case.flops) + case.copies(4 * moved)
    return Pass(sent, case.flops, compute, all_to_all(sent, case.hardware))


def _in_zigzag(case: _Case, total: Pass, moved: float, number: int) -> Pass:
    """The pass after its rows were put into zigzag order, if late ones see more keys.

    Args:
      case: the call.
      total: the pass in zigzag order.
      moved: the bytes of a device that the exchange is of; they are sent in two hops.
      number: the devices among which they are.
    """
    if not case.call.is_uneven or case.call.order != "contiguous":
        return total
    sent = moved * (number - 1) / number
    exposed = total.exposed + 2 * hop(sent / 2, case.hardware)
    return replace(total, sent=total.sent + sent, exposed=exposed)


def _gather(case: _Case) -> Pass:
    """Keys and values gathered; backward, their gradients summed to the devices that hold them.

    Rows are put into zigzag order, if late ones see more keys; then all devices compute the same.
    """
    call, others = case.call, case.number - 1
    share = call.kv_bytes / case.number
    gradients = call.kv_gradient_bytes / case.number if case.is_backward else 0.0
    sent = (share + gradients) * others
    exposed = all_gather(share, case.hardware)
    if gradients:
        exposed += all_gather(gradients, case.hardware)
    flops = case.flops * call.unbalanced(case.number)
    if call.is_causal and case.is_backward:
        flops *= _WITH_LENGTHS
    memory = call.kv_bytes
    if case.is_backward:  # keys, their gradients as a kernel writes them, and those in float32
        memory = 2 * call.kv_bytes + call.kv_gradient_bytes
    total = Pass(sent, flops, case.kernels(flops), exposed, gathered=memory)
    return _in_zigzag(case, total, case.rows, case.number)


def _ring(case: _Case) -> Pass:
    """Keys sent on while a device computes with them; backward, their gradients follow."""
    total = _in_zigzag(case, _rings(case, case.number), case.rows + case.keys, case.number)
    return _as_measured(case.call, total)


def _as_measured(call: SpreadCall, total: Pass) -> Pass:
    """A strategy with rings, and what packed documents take beside the work that is modelled."""
    more = PACKED_RINGS[call.order] - 1 if call.has_documents else 0.0
    return replace(total, compute=total.compute + more * total.seconds)


def _rings(case: _Case, number: int) -> Pass:
    """Rings of `number` devices.

    In zigzag order all steps take equally long. Results are added in float32 in every step: out in
    the forward pass, dq in the backward pass, for which a number is read twice and written once.
    The gradients of keys are sums, float32, in all transfers but the first.
    """
    call, steps = case.call, number - 1
    share = call.kv_bytes / case.number
    gradients = sums_of_gradients = 0.0
    if case.is_backward:
        sums_of_gradients = share / call.width * max(call.width, 4)
        gradients = (share + sums_of_gradients * (steps - 1)) / steps
    flops = case.flops * call.unbalanced(case.number)
    each = (call.query_bytes if case.is_backward else call.out_bytes) / case.number / call.width
    sums = case.copies(each * (4 + 4 + call.width)) * steps
    step = hop(share + gradients, case.hardware)
    hidden = min(step, case.kernels(flops) / number) * steps
    exposed = step * steps - hidden
    if gradients:  # they come home after the last kernel
        home = hop(sums_of_gradients if steps > 1 else share, case.hardware)
        hidden, exposed = max(hidden - home, 0.0), exposed + min(home, hidden)
    sent = (share + gradients) * steps
    return Pass(sent, flops, case.kernels(flops) + sums, exposed, hidden)


def _halo(case: _Case) -> Pass:
    """The window's keys and values sent to the next device, and their gradients back."""
    call = case.call
    rows = min(TILE * math.ceil((call.window or 0) / TILE), call.keys // case.number)
    part = call.kv_bytes * rows / call.keys
    ways = 2 if case.is_backward else 1
    # The last device has no next one.
    sent, exposed = part * ways * (1 - 1 / case.number), hop(part, case.hardware) * ways
    return Pass(sent, case.flops, case.kernels(case.flops), exposed)


def _heads_and_ring(case: _Case) -> Pass:
    """Heads exchanged within groups of h devices, and a ring over the P / h groups."""
    heads, ring = split(case.call, case.hardware.devices) or (1, case.number)
    moved = case.rows + case.keys
    sent = moved * (heads - 1) / heads
    rings = _rings(case, ring)
    total = replace(
        rings,
        sent=rings.sent + sent,
        compute=rings.compute + case.copies(4 * moved),
        exposed=rings.exposed + all_to_all(sent, case.hardware, Devices(heads)),
    )
    return _as_measured(case.call, _in_zigzag(case, total, moved, ring))


def split(call: SpreadCall, devices: Devices) -> tuple[int, int] | None:
    """The most devices of a node that can exchange q's and kv's heads, and a ring's length."""
    within = devices.per_node
    sizes = [x for x in range(within, 1, -1) if within % x == 0 and x < devices.number]
    found = next((x for x in sizes if call.heads % x == 0 == call.kv_heads % x), None)
    return None if found is None else (found, devices.number // found)


_NO_GROUP = Rule[_Case](
    "context/heads+ring/divide",
    lambda x: split(x.call, x.hardware.devices) is None,
    "{heads} heads over {kv_heads} divide over no group of a node's devices that leaves a ring, of "
    "{devices} devices",
    facts=lambda x: {
        "heads": x.call.heads,
        "kv_heads": x.call.kv_heads,
        "devices": x.number,
    },
)


def _spread(case: _Case) -> Spread:
    """The call with what its sizes tell."""
    call, number = case.call, case.number
    return Spread(
        Meaning(1.0, is_causal=call.is_causal, window=(call.window, None)),
        (),
        call.queries // number,
        call.keys // number,
        number,
        call.order,
        heads=call.heads,
    )


_PASSES: dict[str, Callable[[_Case], Pass]] = {
    "heads": _heads, "gather": _gather, "ring": _ring, "halo": _halo, "heads+ring": _heads_and_ring,
}  # fmt: skip


def cost(
    strategy: str,
    call: SpreadCall,
    hardware: Hardware,
    refused: Mapping[str, tuple[Reason, ...]] | None = None,
) -> Cost:
    """What a strategy costs for a call, or why it does not apply.

    Args:
      strategy: its name.
      call: the call.
      hardware: where it runs.
      refused: by strategy, the reasons not to run the call; None for those that its sizes tell.
    """
    case = _Case(call, hardware)
    known = all_reasons(_spread(case)) if refused is None else refused
    reasons = known.get(strategy, ())
    if strategy == "heads+ring":
        reasons = (*known.get("ring", ()), *broken((_NO_GROUP,), case))
    if reasons:
        return Cost(strategy, reasons)
    costs_of_pass = _PASSES[strategy]
    return Cost(
        strategy,
        forward=costs_of_pass(case),
        backward=costs_of_pass(replace(case, is_backward=True)),
        split=split(call, hardware.devices) if strategy == "heads+ring" else None,
    )


def costs(
    call: SpreadCall, hardware: Hardware, refused: Mapping[str, tuple[Reason, ...]] | None = None
) -> list[Cost]:
    """What every strategy costs for a call.

    Args:
      call: the call.
      hardware: where it runs.
      refused: as for `cost`.
    """
    return [cost(x, call, hardware, refused) for x in _PASSES]


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
    return costs(call, target_hardware(spread.devices), refused)


def target_hardware(devices: int) -> Hardware:
    """So many devices like the ones that the program is for, in nodes of 8."""
    node = _NODE if devices % _NODE == 0 else devices
    if default_device().platform == "rocm":
        return Hardware(Devices.of(devices, node), INFINITY_FABRIC, MI300X)
    return Hardware(Devices.of(devices, node), NVLINK_4, H100)


def cheapest(strategies: Iterable[Cost]) -> Strategy | None:
    """The strategy with the least modelled time; None if that exchanges heads."""
    best = choose(strategies)
    return next((x for x in STRATEGIES if best is not None and x == best.strategy), None)
