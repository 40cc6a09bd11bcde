"""The order of implementations for a call: the fastest first, by measured rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from attn_dispatch import settings
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import scratch
from attn_dispatch.core.choice.rates import (
    PUBLIC_REPORTS,
    DeviceRates,
    Times,
    measured_times,
    rates_for,
)
from attn_dispatch.core.choice.time_model import XLA_LEAST, XLA_MARGIN, Prediction, predicted
from attn_dispatch.core.choice.work import work_of
from attn_dispatch.core.eligibility import reasons_and_chain
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Implementation

_WORTH_TWO = 0.9
"""Two implementations run the passes of a step if they take less than this share of the time that
the best single one takes."""

IsExpected = Callable[[Implementation, Device], bool]


@dataclass(frozen=True)
class Ranking:
    """Implementations in order, and what decided it."""

    order: tuple[Implementation, ...]
    predictions: dict[str, Prediction]
    """By name, the predicted times of those whose rates are known."""
    basis: str = ""
    """What the order follows: where rates were measured, or a public report; "" for the order
    without measurements."""


def ranking(
    implementations: Sequence[Implementation],
    spec: AttentionSpec,
    device: Device,
    is_expected: IsExpected,
) -> Ranking:
    """The implementations, the one with the least predicted time first.

    Implementations that are not expected on the device, or have no prediction, follow in the order
    that was given. XLA comes before a kernel only if it may replace one (`_may_replace_kernels`).

    Args:
      implementations: the implementations, in the order without measurements.
      spec: the call.
      device: the device that it is for.
      is_expected: whether an implementation is for the device and, if it is an extra, usable.
    """
    if not _has_rates(spec):
        return Ranking(tuple(implementations), {})
    if (rates := rates_for(device)) is None:
        return _unmeasured(implementations, device, is_expected)
    expected = [x for x in implementations if is_expected(x, device)]
    predictions = _predictions(rates, expected, spec)
    times = _deciding_times(predictions, rates, expected, spec)
    measured = _measured(spec, device)
    if measured:  # what was not measured follows
        least = max(measured.values())
        times = {x: least + us for x, us in times.items()} | dict(measured)
    kernels = [x for x in expected if x.PLATFORM and x.NAME in times]
    first = sorted(kernels, key=lambda x: times[x.NAME])
    for xla in (x for x in expected if x.PLATFORM is None and x.NAME in times):
        slower = [x for x in first if _is_beaten(times[x.NAME], times[xla.NAME])]
        # The answer may cost a plan, so it is asked for only if a kernel is slower.
        if slower and _may_replace_kernels(xla, slower, spec, device):
            first.insert(len(first) - len(slower), xla)
    others = [x for x in implementations if x not in first]
    assumed = work_of(spec).assumed
    how = "by measured times of this call" if measured else "by predicted time"
    basis = f"{how}, {rates.measured_on(device)}"
    basis += f"; assumed: {assumed}" if assumed else ""
    return Ranking((*first, *others), predictions, basis)


def _is_beaten(kernel: float, xla: float) -> bool:
    """Whether XLA's time is enough better than a kernel's to take its place.

    Among other operations a few microseconds are not worth it: there, launches cost nothing.
    """
    is_alone = settings.current().is_alone
    return kernel >= XLA_MARGIN * xla and (is_alone or kernel - xla >= XLA_LEAST)


def _measured(spec: AttentionSpec, device: Device) -> Times:
    """The measured times of this call, if they say something else than the model."""
    other = _other_pass(spec)
    forward = other if spec.is_backward and other is not None else spec
    is_alone = settings.current().is_alone
    return measured_times(forward, device, is_step=other is not None, is_alone=is_alone)


def _predictions(
    rates: DeviceRates, implementations: Sequence[Implementation], spec: AttentionSpec
) -> dict[str, Prediction]:
    found = {x.NAME: predicted(rates, x.NAME, spec) for x in implementations}
    return {name: x for name, x in found.items() if x is not None}


def _deciding_times(
    predictions: Mapping[str, Prediction],
    rates: DeviceRates,
    implementations: Sequence[Implementation],
    spec: AttentionSpec,
) -> dict[str, float]:
    """The times by which implementations are ordered.

    One implementation runs both passes of a step, unless two are predicted to save a tenth of the
    time: sums are predicted better than their parts, and the arrays of a mask serve both passes.
    """
    own = _microseconds(predictions)
    other_pass = _other_pass(spec)
    if other_pass is None:
        return own
    other = _microseconds(_predictions(rates, implementations, other_pass))
    sums = {name: us + other[name] for name, us in own.items() if name in other}
    if not sums or min(own.values()) + min(other.values()) < _WORTH_TWO * min(sums.values()):
        return own
    return {name: sums.get(name, sum(sums.values()) + us) for name, us in own.items()}


def _microseconds(predictions: Mapping[str, Prediction]) -> dict[str, float]:
    is_alone = settings.current().is_alone
    return {name: x.alone if is_alone else x.device for name, x in predictions.items()}


def _other_pass(spec: AttentionSpec) -> AttentionSpec | None:
    """The call of the other direction in a training step; None if there is none."""
    if not spec.is_backward:
        return spec.expected_backward()
    options = spec.options.forward
    return AttentionSpec(options, spec.operands[: len(options.operands)])


def _unmeasured(
    implementations: Sequence[Implementation], device: Device, is_expected: IsExpected
) -> Ranking:
    """The order for a device without rates: as given, with the winner of a public report first."""
    if (report := PUBLIC_REPORTS.get(device.arch)) is None:
        return Ranking(tuple(implementations), {})

    def is_later(x: Implementation) -> bool:
        return x.NAME != report.first or not is_expected(x, device)

    order = sorted(implementations, key=is_later)
    return Ranking(tuple(order), {}, f"not measured here; {report.source}")


def _has_rates(spec: AttentionSpec) -> bool:
    """Whether a kernel may run the call. If none can, `select.choose` warns with the reasons."""
    is_16_bit = spec.dtype in ("bfloat16", "float16")
    return is_16_bit and spec.wanted.derivative is None and not (spec.symbols or spec.is_empty)


def _may_replace_kernels(
    xla: Implementation, kernels: Iterable[Implementation], spec: AttentionSpec, device: Device
) -> bool:
    """Whether XLA may come before slower kernels.

    It may not under the fallback policy "error", nor where results would differ: XLA lets NaN of
    one sequence into others of the same batch row, and draws another dropout mask. XLA must keep to
    the limit of scratch memory, as kernels do. If no kernel runs the call, it replaces none, and
    the warning of `select.choose` has the reasons.
    """
    if settings.current().fallback == "error" or spec.is_packed or spec.meaning.dropout_rate:
        return False
    limit = scratch.limit_of(spec, device, lambda: 0)
    if limit is not None and xla.plan(spec, device).scratch_bytes > limit.bytes:
        return False
    # Extras first: their rules answer at once, and cuDNN has to plan.
    return any(
        not reasons_and_chain(x, spec, device)[0]
        for x in sorted(kernels, key=lambda x: not x.IS_EXTRA)
    )
