"""The conformance suite, which every implementation must pass, case by case."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from attn_dispatch import settings
from attn_dispatch.call.operands import is_mod_operand
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import select
from attn_dispatch.core.rewrites.narrow_bias import NARROW_BIAS
from attn_dispatch.core.verdict import Verdict, verdicts_on
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import default_device
from attn_dispatch.reason import Reason
from attn_dispatch_tools.verify import dropout_checks
from attn_dispatch_tools.verify.calls import (
    CaseProgram,
    custom_calls_in,
    custom_calls_of,
    numpy_results,
    specs_in,
)
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.documents import Document
from attn_dispatch_tools.verify.judge import (
    allowances,
    error,
    loosened,
    row_bias_gradient,
    with_rounded_delta,
)
from attn_dispatch_tools.verify.naive import naive
from attn_dispatch_tools.verify.outcome import Outcome
from attn_dispatch_tools.verify.reference import (
    Operands,
    attended,
    invalid_queries,
    poison_padding,
    reference,
)

_KERNEL_OR_XLA = NARROW_BIAS.name
"""With this rewrite, whether a kernel or XLA computes a call is decided only when it runs."""


@dataclass(frozen=True)
class _Traced:
    """A traced program, and the verdicts on its calls by direction. With ragged queries on pages
    there may be two forward calls."""

    program: CaseProgram
    traced: Any
    verdicts: dict[str, Verdict]

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """All reasons against any of the calls."""
        return tuple(dict.fromkeys(x for y in self.verdicts.values() for x in y.reasons))


class Conformance:
    """The suite for one implementation: name it in a subclass or in an instance.

    Cases run through `primitive.attention` under `jax.jit` and `jax.vjp`, with this implementation
    as the only choice. Set ATTN_DISPATCH_POISON=1 before calls are compiled, so that results and
    workspaces of vendor kernels hold NaN beforehand.
    """

    implementation: str
    has_fallback = True
    """Whether XLA may compute the gradients that this implementation refuses."""

    @cached_property
    def device(self) -> Device:
        """The device that calls are planned for."""
        return default_device()

    @property
    def keeps_nan_in_documents(self) -> bool:
        """Whether NaN in one document must not reach others in the same row."""
        return select.named(self.implementation).KEEPS_NAN_APART

    @property
    def takes_delta_from_out(self) -> bool:
        """Whether the backward pass computes delta, Σ p · dp, as Σ out · dout.

        XLA's backward pass has all keys of a row at once, and sums p · dp over them.
        """
        return self.implementation != "xla"

    @property
    def rows_per_random_number(self) -> int:
        """The number of rows whose entries of a dropout mask, for one attention key, come from one
        random number.

        On cuDNN rows t, t + 2, t + 4 and t + 6 of every eight do: tests/gpu/test_dropout_rows.py.
        """
        return 4 if self.implementation == "cudnn" else 1

    @contextmanager
    def lowering(self) -> Iterator[None]:
        """A context around the lowering of a call."""
        yield

    def check(self, case: Case) -> Outcome:
        """Run a case, if the implementation is eligible for it, and judge all results."""
        started = time.perf_counter()
        with settings.restored(replace(settings.current(), first_rewrite=case.rewrite or None)):
            outcome = self._check(case)
        if case.rewrite and (outcome.status == "refused" or outcome.refused_gradients):
            outcome = self._check(case)
        return replace(outcome, seconds=round(time.perf_counter() - started, 3))

    def refuses(self, case: Case) -> tuple[Reason, ...]:
        """Why the implementation cannot run a case's forward call; empty if it can."""
        return self._trace(case, case.operands() | case.cotangents(), ()).reasons

    def _check(self, case: Case) -> Outcome:
        outcome = Outcome(case.name, case.family)
        given = case.operands() | case.cotangents()
        poisoned = poison_padding(case.forward_options(), given, case.poison)
        traced, outcome = self._eligible(case, poisoned, outcome)
        if outcome.status == "refused":
            return outcome
        with self.lowering():
            run, text = traced.program.run_and_text(traced.traced)
        outcome = outcome.failed(
            *self._wrong_kernels(case, traced.program.gradients, text, outcome)
        )

        keep = None
        if case.dropout:
            draw, rewrites = self._dropout(case, poisoned)
            outcome = replace(outcome, rewrites=tuple(dict.fromkeys(outcome.rewrites + rewrites)))
            keep, failures = dropout_checks.check(case, draw, poisoned, self.rows_per_random_number)
            outcome = outcome.failed(*(f"dropout: {x}" for x in failures))
        got = numpy_results(run, poisoned)
        outcome = self._judged(case, given, keep, got, outcome)
        outcome = outcome.failed(*_not_zero(case, given, got))
        if case.deterministic:
            outcome = outcome.failed(*_not_repeated(got, numpy_results(run, poisoned)))
        return outcome.failed(*self._leaks(case, poisoned, run, got, outcome))

    def _eligible(
        self, case: Case, operands: Operands, outcome: Outcome
    ) -> tuple[_Traced, Outcome]:
        """The program of a case, with all gradients that the implementation can compute.

        The verdicts are on the calls that the traced program makes, whatever the transform.
        """
        wanted = case.gradients
        traced = self._trace(case, operands, wanted)
        if traced.reasons and wanted:
            own, refused = self._own_gradients(case, operands, wanted)
            refused = refused if own else {"/".join(wanted): traced.reasons}
            outcome = _left_to_xla(outcome, refused)
            traced = self._trace(case, operands, own)
            if not own and self.has_fallback and not traced.reasons:
                by_both = self._trace(case, operands, wanted, use_xla=True)
                # With dropout, XLA would compute the forward pass as well, unless the
                # implementation can return its mask.
                if by_both.verdicts["forward"].implementation == self.implementation:
                    traced = by_both
        if traced.reasons:
            return traced, _refused(outcome, traced.reasons)
        plans = {x: y.plan for x, y in traced.verdicts.items()}
        engines = {x: y.engine for x, y in plans.items() if y is not None}
        backward = traced.verdicts.get("backward")
        name = "" if backward is None else backward.implementation
        rewrites = tuple(dict.fromkeys(x for y in traced.verdicts.values() for x in y.rewrites))
        return traced, replace(outcome, engines=engines, backward=name, rewrites=rewrites)

    def _own_gradients(
        self, case: Case, operands: Operands, wanted: tuple[str, ...]
    ) -> tuple[tuple[str, ...], dict[str, tuple[Reason, ...]]]:
        """The gradients that the implementation computes, and its reasons against the others."""
        reasons = {name: self._trace(case, operands, (name,)).reasons for name in wanted}
        own = tuple(name for name in wanted if not reasons[name])
        if own and self._trace(case, operands, own).reasons:
            own = ()
        return own, {name: x for name, x in reasons.items() if x}

    def _trace(
        self,
        case: Case,
        operands: Operands,
        gradients: tuple[str, ...],
        *,
        use_xla: bool = False,
    ) -> _Traced:
        """The traced program. With `use_xla` XLA computes what the implementation refuses."""
        preference = (self.implementation, "xla") if use_xla else (self.implementation,)
        program = CaseProgram.of(case, preference, gradients)
        traced = program.trace(operands)
        verdicts: dict[str, Verdict] = {}
        for spec in specs_in(traced.jaxpr):
            direction = "backward" if spec.is_backward else "forward"
            name = f"{direction}, another" if direction in verdicts else direction
            verdicts[name] = self._verdict(spec)
        return _Traced(program, traced, verdicts)

    def _verdict(self, spec: AttentionSpec) -> Verdict:
        """The verdict of the first implementation in order that can run it, else of the first."""
        found = verdicts_on(spec, self.device)
        return next((x for x in found if x.is_eligible), found[0])

    def _wrong_kernels(
        self, case: Case, gradients: tuple[str, ...], text: str, outcome: Outcome
    ) -> list[str]:
        """A failure if the program's custom calls are not the expected ones."""
        wanted = custom_calls_of(self.implementation)
        got = custom_calls_in(text)
        # XLA computes a sink's gradient, and some others (core/rewrites); with a scale of 0 the
        # query's gradient is 0.
        without_kernel = {"sinks", "alibi_slopes", "bias"} | {
            x for x in gradients if is_mod_operand(x) or (x == "query" and case.scale == 0)
        }
        may_be_missing = without_kernel.issuperset(gradients) and wanted.get("backward") not in got
        if outcome.backward != self.implementation or may_be_missing:
            wanted = {x: y for x, y in wanted.items() if x == "forward"}
        return [f"kernels: expected custom calls {sorted(wanted.values())}, got {sorted(got)}"] * (
            got != set(wanted.values())
        )

    def _dropout(
        self, case: Case, operands: Operands
    ) -> tuple[dropout_checks.Draw, tuple[str, ...]]:
        """A function that draws the implementation's mask, and the rewrites that return it.

        If the implementation cannot return its mask, it is inferred from outputs.
        """
        jitted = replace(case, transform="jit") if case.transform in ("eager", "donate") else case
        asked = CaseProgram.keep_mask(jitted, (self.implementation,))
        traced = asked.trace(operands)
        verdicts = [self._verdict(spec) for spec in specs_in(traced.jaxpr)]
        if all(verdict.is_eligible for verdict in verdicts):
            with self.lowering():
                compiled = asked.compile(traced)
            rewrites = tuple(rewrite for verdict in verdicts for rewrite in verdict.rewrites)
            return lambda operands: numpy_results(compiled, operands)["keep"], rewrites
        probed = CaseProgram.of(jitted, (self.implementation,), ())
        with self.lowering():
            compiled = probed.compile(probed.trace(operands))
        draw = dropout_checks.probe(lambda operands: numpy_results(compiled, operands)["out"], case)
        return draw, ()

    def _judged(
        self, case: Case, given: Operands, keep: np.ndarray | None, got: Operands, outcome: Outcome
    ) -> Outcome:
        """The outcome with errors against float64, and failures where they exceed allowances."""
        options = case.forward_options()
        is_fused, exactly_given = self._is_fused(case, outcome), given
        if is_fused:
            forward = {x: y for x, y in given.items() if x != "out_grad"}
            exact_out = reference(options, forward, keep)["out"]
            given = with_rounded_delta(got["out"], exact_out, given)
        expected, plain = reference(options, given, keep), naive(options, given, keep)
        allowance = allowances(options, expected, plain, got, is_fused=is_fused)
        allowance = loosened(allowance, expected, plain, got)
        errors = {name: error(x, expected[name]) for name, x in got.items()}
        if is_fused and outcome.rewrites:
            # XLA may compute these gradients, without the rounding of a kernel's output.
            exact = reference(options, exactly_given, keep)
            may_all_be_xlas = _KERNEL_OR_XLA in outcome.rewrites
            for name in errors:
                if not (
                    may_all_be_xlas or name in ("bias", "alibi_slopes") or is_mod_operand(name)
                ):
                    continue
                errors[name] = min(errors[name], error(got[name], exact[name]))
            if "bias" in errors and "sinks" in given and case.bias and case.bias[3] == 1:
                rows = row_bias_gradient(exact, exactly_given, given, case.bias)
                errors["bias"] = min(errors["bias"], error(got["bias"], rows))
        outcome = replace(outcome, errors=errors, allowances=allowance)
        return outcome.failed(
            *(
                f"{name}: error {x:.3g}, allowed {allowance[name]:.3g}"
                for name, x in errors.items()
                if not x <= allowance[name]
            )
        )

    def _is_fused(self, case: Case, outcome: Outcome) -> bool:
        """Whether the backward pass computed delta from the output, rounded to 16 bits."""
        is_own = outcome.backward == self.implementation
        return is_own and self.takes_delta_from_out and case.dtype in ("float16", "bfloat16")

    def _leaks(
        self,
        case: Case,
        operands: Operands,
        run: Any,
        got: Operands,
        outcome: Outcome,
    ) -> list[str]:
        """Failures where a change of one packed document changes another.

        No bit of the results may change, and none of deterministic gradients.
        """
        document = Document.of(case)
        if document is None:
            return []
        failures = []
        fills: dict[str, float | None] = {"random": None}
        is_own = (
            outcome.backward in ("", self.implementation) and _KERNEL_OR_XLA not in outcome.rewrites
        )
        if self.keeps_nan_in_documents and is_own:
            fills["NaN"] = np.nan
        before = document.without(got)
        for what, fill in fills.items():
            changed = numpy_results(run, document.changed(operands, fill))
            for name, x in document.without(changed).items():
                exact = name in ("out", "lse", "row_max") or case.deterministic
                if exact and not _same_bits(x, before[name]):
                    failures.append(
                        f"documents: {what} values in one document changed `{name}` of another"
                    )
                elif not exact and not error(x, before[name]) <= outcome.allowances[name]:
                    failures.append(
                        f"documents: {what} values in one document spoiled `{name}` of another"
                    )
        return failures


def _refused(outcome: Outcome, reasons: Sequence[Reason]) -> Outcome:
    outcome = replace(outcome, refused_gradients={}, gradient_rules={}, status="refused")
    rules = tuple(x.rule for x in reasons)
    return replace(outcome, reasons=tuple(map(str, reasons)), rules=rules)


def _left_to_xla(outcome: Outcome, reasons: Mapping[str, Sequence[Reason]]) -> Outcome:
    """The outcome, with the reasons against each gradient."""
    return replace(
        outcome,
        refused_gradients={name: tuple(map(str, x)) for name, x in reasons.items()},
        gradient_rules={name: tuple(y.rule for y in x) for name, x in reasons.items()},
    )


def _not_zero(case: Case, given: Operands, got: Operands) -> list[str]:
    """Failures where padding rows, of queries or keys, are not exactly 0.

    Only the gradients of invalid queries must be 0, not their outputs.
    """
    options = case.forward_options()
    may = attended(options, given)
    padding_queries = np.asarray(~may.any(axis=3)).swapaxes(1, 2)  # [B, T, N]
    b, n, t, s = may.shape
    groups = may.reshape(b, case.k, n // case.k, t, s)
    padding_keys = np.asarray(~groups.any(axis=(2, 3))).swapaxes(1, 2)  # [B, S, K]
    invalid = np.array([invalid_queries(options, given, row) for row in range(b)])[..., None]
    padding = {"out": padding_queries & ~invalid, "query": padding_queries}
    padding |= dict.fromkeys(("key", "value"), padding_keys)
    return [
        f"zeros: {name} is not exactly 0 where nothing attends"
        for name, rows in padding.items()
        if name in got and np.any(got[name][rows] != 0)
    ]


def _not_repeated(first: Operands, second: Operands) -> list[str]:
    return [
        f"deterministic: {name} differs from call to call"
        for name in first
        if not _same_bits(first[name], second[name])
    ]


def _same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return x.tobytes() == y.tobytes()
