"""Which implementation runs a call and why the others do not, as data that prints as a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from textwrap import indent

import jax
from jaxlib.version import __version__ as JAXLIB_VERSION

from attn_dispatch import settings
from attn_dispatch import text as plain_text
from attn_dispatch.call.options import as_partners, backward_options
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.core.context.cost import table
from attn_dispatch.core.device_share import DeviceShare
from attn_dispatch.core.mask_share import MaskShare
from attn_dispatch.core.verdict import Verdict, chosen, verdicts_on
from attn_dispatch.devices.device import Device
from attn_dispatch.reason import Reason

UNKNOWN = "unknown"
"""What is chosen, if a planner that is not here would decide it."""

_WIDTH = 100


@dataclass(frozen=True)
class Explanation:
    """The result of `attn_dispatch.explain`; `str()` of it is a table."""

    call: AttentionSpec
    device: Device
    versions: tuple[tuple[str, str], ...]
    """(library, version) of everything that decides the choice."""
    forward: tuple[Verdict, ...]
    """One verdict for each implementation, in order of preference."""
    backward: tuple[Verdict, ...]
    share: DeviceShare | None = None
    """If the arrays are sharded: which part of the caller's call `call` is, that of one device."""
    mask: MaskShare | None = None
    """The share of the call that a mask_mod leaves; None without one, or if that is not known."""
    basis: str = ""
    """What the order of the implementations follows: where rates of predicted times were measured
    and what was assumed of arrays, or what others reported. "" for the order of the list."""
    alone: str = ""
    """What runs the call on this machine in a program of nothing else, if that is not what is
    chosen: the host's launches count there (core/whole_call.py)."""
    single_queries: Explanation | None = None
    """The explanation of the separate call for sequences of one query, if `cu_seqlens_q` leads to
    two calls."""

    @property
    def chosen_forward(self) -> str | None:
        """The implementation that runs the forward pass; None if none can, and "unknown" if that
        takes a planner that is not here."""
        return _name(chosen(self.forward))

    @property
    def chosen_backward(self) -> str | None:
        """The implementation that runs the backward pass; None and "unknown" as above."""
        return _name(chosen(self.backward))

    @property
    def missing_planner(self) -> Reason | None:
        """If what runs a direction is unknown: which planner is not here. Its remedy is the command
        that installs it."""
        found = (x for x in map(chosen, (self.forward, self.backward)) if x and x.is_unknown)
        return next((x.reasons[0] for x in found), None)

    @property
    def _chosen(self) -> str:
        """What runs each direction; "none" if nothing runs either."""
        names = {"forward": self.chosen_forward}
        if self.backward:
            names["backward"] = self.chosen_backward
        if not any(names.values()):
            return "none"
        return ", ".join(f"{direction}: {name or 'none'}" for direction, name in names.items())

    def __repr__(self) -> str:
        query = self.call.operands[0]
        return f"<Explanation of a call of {query}: {self._chosen}, {self.device.name}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = _WIDTH, *, codes: bool = True) -> str:
        """The table, in lines of at most `width` columns as far as words allow.

        With `codes`, it names cuDNN's engines, such as eng9_k24=1.
        """

        def wrapped(label: str, text: str) -> list[str]:
            return plain_text.wrapped(label, text, width)

        remedy = select.remedy_elsewhere(self.call.meaning.implementation, self.device)
        versions = ", ".join(f"{name} {version}" for name, version in self.versions)
        lines = [
            *wrapped("call      ", str(self.call)),
            *([] if self.share is None else wrapped("share     ", str(self.share))),
            *wrapped("device    ", f"{self.device.platform}: {self.device}"),
            *wrapped("versions  ", versions),
            f"chosen    {self._chosen}",
            *(wrapped("remedy    ", remedy) if remedy else []),
            *planner_lines(self.missing_planner, width),
            *(wrapped("alone     ", self.alone) if self.alone else []),
            *(wrapped("order     ", self.basis) if self.basis else []),
        ]
        if self.share is not None and self.share.strategies:
            lines += [
                "strategies, modelled",
                *indent(table(self.share.strategies), "  ").split("\n"),
            ]
        if self.mask is not None:
            lines.extend(wrapped("mask_mod  ", str(self.mask)))
        directions = (("forward", self.forward), ("backward", self.backward))
        if self.share is not None and self.share.refusal:
            lines += wrapped("refused   ", self.share.refusal)
            directions = ()
        for direction, found in directions:
            for verdict in found:
                lines += verdict_lines(f"{direction:<9} ", verdict, width, codes=codes)
        if self.single_queries is not None:
            lines = [self.single_queries.text(width, codes=codes), "", *lines]
        return "\n".join(lines)


def planner_lines(missing: Reason | None, width: int) -> list[str]:
    """The planner that is missing, with the command that installs it."""
    if missing is None:
        return []
    if not missing.remedy:
        return plain_text.wrapped("planner   ", f"not here: {missing}", width)
    how = "not here; in a checkout of attn-dispatch, this installs it:"
    # To copy: only the terminal may wrap it.
    return [*plain_text.wrapped("planner   ", how, width), f"{' ' * 12}{missing.remedy}"]


def plan_text(verdict: Verdict, *, codes: bool) -> str:
    """The engine and the scratch memory of an implementation that runs the call."""
    assert verdict.plan is not None
    scratch = f"scratch memory {plain_text.in_units(verdict.scratch_bytes)}"
    is_named = codes or not verdict.plan.engine_is_code
    return f"{verdict.plan.engine}, {scratch}" if is_named else scratch


def verdict_lines(
    direction: str, verdict: Verdict, width: int, *, codes: bool, how: str = "runs", why: str = ""
) -> list[str]:
    """How the implementation runs the call, and why it does, or every reason why it does not."""
    label = f"{direction}{verdict.implementation:<7} "
    margin = " " * len(label)
    if verdict.is_unknown:
        return plain_text.wrapped(label, f"unknown: {verdict.reasons[0]}", width)
    if verdict.plan is None:
        lines = [f"{label}cannot run:"]
        for reason in verdict.reasons:
            lines += plain_text.wrapped(f"{margin}- ", reason.with_remedy, width)
        return lines
    lines = plain_text.wrapped(label, f"{how}: {plan_text(verdict, codes=codes)}", width)
    details = [
        ("chosen:    ", [why] if why else []),
        ("tuned:     ", [] if verdict.tuned is None else [str(verdict.tuned)]),
        ("predicted: ", [str(verdict.predicted)] if verdict.predicted else []),
        ("limit:     ", [verdict.limit] if verdict.limit else []),
        ("rewritten: ", verdict.rewrites),
        ("because:   ", [reason.with_remedy for reason in verdict.reasons_as_it_is]),
    ]
    for name, texts in details:
        for text in texts:
            lines += plain_text.wrapped(f"{margin}{name}", text, width)
    return lines


def explain_call(
    spec: AttentionSpec, share: DeviceShare | None, device: Device, *, has_lse_grad: bool
) -> Explanation:
    """The explanation of a forward call and the backward call that belongs to it.

    The backward call computes all gradients, through lse too if `has_lse_grad`. Both are calls of
    training: with dropout, an implementation that refuses one refuses both.
    """
    options = spec.options
    # With dropout the forward pass names its backward call before gradients are known, so that a
    # returned lse always has a gradient (derivatives.py).
    has_lse_grad |= options.meaning.dropout_rate > 0 and options.wanted.needs_lse
    wanted = options.differentiable
    options = options.returning(replace(options.wanted, differentiated=wanted))
    forward, backward = as_partners(
        options, backward_options(options, wanted, has_lse_grad=has_lse_grad)
    )
    # A paged call has no backward pass.
    last = None if spec.is_paged else spec.backward(backward)
    return explain_specs(spec, device, replace(spec, options=forward), last, share)


def explain_specs(
    call: AttentionSpec,
    device: Device,
    forward: AttentionSpec | None,
    backward: AttentionSpec | None,
    share: DeviceShare | None = None,
) -> Explanation:
    """The explanation of a call that is lowered to these two; None is a direction without one."""

    def verdicts(spec: AttentionSpec | None) -> tuple[Verdict, ...]:
        if spec is None:
            return ()
        if share is not None and share.refusal:
            reasons = (Reason("context/no_strategy", text=share.refusal),)
            return tuple(Verdict(name, reasons, None) for name in select.names())
        return verdicts_on(spec, device)

    forward_verdicts, backward_verdicts = map(verdicts, (forward, backward))
    found = Explanation(call, device, _versions(device), forward_verdicts, backward_verdicts, share)
    basis = select.ranked(forward or backward or call, device).basis
    return replace(found, basis=basis, alone=_alone(found, forward, backward))


def _alone(
    found: Explanation, forward: AttentionSpec | None, backward: AttentionSpec | None
) -> str:
    if settings.current().targets or found.share is not None:
        return ""  # such a call never counts as all of its program
    others = {
        direction: select.chosen_alone(spec, found.device)
        for direction, spec in (("forward", forward), ("backward", backward))
        if spec is not None
    }
    usual = {"forward": found.chosen_forward, "backward": found.chosen_backward}
    if all(usual[direction] == name for direction, name in others.items()):
        return ""
    return ", ".join(f"{x}: {name or 'none'}" for x, name in others.items())


def _versions(device: Device) -> tuple[tuple[str, str], ...]:
    ours, *vendors = select.versions(device).items()
    return (ours, ("jax", jax.__version__), ("jaxlib", JAXLIB_VERSION), *vendors)


def _name(verdict: Verdict | None) -> str | None:
    if verdict is None:
        return None
    return UNKNOWN if verdict.is_unknown else verdict.implementation
