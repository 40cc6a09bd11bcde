"""A case compiled for AITER, whose results can be checked against the float64 reference."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import aiter, xla
from attn_dispatch.aiter import arrays as aiter_arrays
from attn_dispatch.aiter import kernels as aiter_kernels
from attn_dispatch.aiter.call import AiterCall, call_of
from attn_dispatch.aiter.kernels import Kernel
from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options
from attn_dispatch_tools.verify.judge import (
    allowances,
    error,
    loosened,
    with_rounded_delta,
)
from attn_dispatch_tools.verify.naive import naive
from attn_dispatch_tools.verify.reference import Operands, poison_padding, reference, segment_ids
from tests.support.aiter_dispatch.calls import struct_of
from tests.support.emulator.native import Emulator


@dataclass(frozen=True)
class Check:
    """A compiled case, its expected results, and the errors that are allowed."""

    case: Case
    emulator: Emulator
    compiled: Any
    arrays: dict[str, jax.Array]
    expected: Operands
    allowance: dict[str, float]
    chosen: dict[str, tuple[AiterCall, Kernel]]
    """The call and the kernel that AITER must get, forward and, if there is one, backward."""

    @staticmethod
    def of(case: Case, device: Device, emulator: Emulator) -> Check:
        """Compile the forward call, and the backward call for every gradient that AITER computes.

        NaN fills all padding. `emulator` is the one that runs the custom calls.
        """
        gradients = gradients_of(case, device)
        given = _with_residuals(case)
        options = case.forward_options()
        arrays = {x: jnp.asarray(y) for x, y in poison_padding(options, given).items()}
        keep = _keep_mask(case, emulator)
        expected, plain = reference(options, given, keep), naive(options, given, keep)
        allowance = allowances(options, expected, plain, ("out", "lse", *gradients))
        compiled = _program(case, device, gradients).lower(arrays).compile()
        chosen = Check.chosen_for(case, device)
        return Check(case, emulator, compiled, arrays, expected, allowance, chosen)

    @staticmethod
    def chosen_for(
        case: Case, device: Device, *, needs_lse: bool = True
    ) -> dict[str, tuple[AiterCall, Kernel]]:
        """The call and the kernel that the front end chooses for the case, by direction."""
        operands = _with_residuals(case)
        options = {"forward": case.forward_options(needs_lse=needs_lse)}
        if gradients := gradients_of(case, device):
            options["backward"] = case.backward_options(gradients)
        calls = {x: call_of(_spec_of(case, y, operands)) for x, y in options.items()}
        return {x: (y, aiter_kernels.kernel_for(y, device.arch)) for x, y in calls.items()}

    def run(self) -> Operands:
        """The results: out, lse and the gradients."""
        return {x: np.asarray(y, np.float64) for x, y in self.compiled(self.arrays).items()}

    def errors(self) -> dict[str, float]:
        """The largest error of each result as a share of what is allowed: above 1 is wrong."""
        return self.errors_of(self.run())

    def errors_of(self, got: Operands) -> dict[str, float]:
        assert got.keys() == self.allowance.keys()
        return {x: error(got[x], self.expected[x]) / self.allowance[x] for x in got}

    def errors_by_verify(self, got: Operands) -> dict[str, float]:
        """The errors as `verify` judges them: a kernel takes delta from its rounded output."""
        options, given = self.case.forward_options(), _with_residuals(self.case)
        keep, is_fused = _keep_mask(self.case, self.emulator), len(got) > 2
        if is_fused:
            given = with_rounded_delta(got["out"], self.expected["out"], given)
        expected, plain = reference(options, given, keep), naive(options, given, keep)
        allowed = allowances(options, expected, plain, tuple(got), is_fused=is_fused)
        allowed = loosened(allowed, expected, plain, got)
        return {x: error(got[x], expected[x]) / allowed[x] for x in got}

    def differences_from_expected_calls(self) -> list[str]:
        """The differences between the calls of AITER in the last run and the expected ones."""
        return differences_from_expected_calls(self.case, self.chosen, self.emulator)


def differences_from_expected_calls(
    case: Case, chosen: dict[str, tuple[AiterCall, Kernel]], emulator: Emulator
) -> list[str]:
    """The differences between the calls of AITER in a case's last run and the expected ones.

    The expected calls are those of `struct_of`, which tests pass to AITER's compiled dispatch.
    Every field of aiter_api.h is compared, a pointer only as null or not, except the strides of a
    bias, which may be broadcast. `chosen` comes from `Check.chosen_for`. The result should be [].
    """
    wrong = []
    for direction, (call, kernel) in chosen.items():
        got = emulator.last_call("split_kv" if call.is_split else direction)
        expected = struct_of(
            call,
            use_asm=kernel.family == "asm",
            rounding=kernel.bf16_rounding,
            accumulator=kernel.accumulator,
            num_splits=kernel.num_splits,
        )
        expected.call.scale = abs(case.scale) or 1.0  # scaled_query.py changes the query instead
        wrong += [f"{direction}: {x}" for x in _differences(got, expected)]
    return wrong


def _differences(got: Any, expected: Any) -> list[str]:
    found = []
    for name, kind in expected._fields_:
        x, y = getattr(got, name), getattr(expected, name)
        if issubclass(kind, ctypes.Structure):
            found += _differences(x, y)
        elif kind is ctypes.c_void_p:
            found += [name] if bool(x) != bool(y) else []
        elif x != y and not name.endswith("stride_bias"):
            found.append(f"{name}: expected {y}, got {x}")
    return found


def gradients_of(case: Case, device: Device) -> tuple[str, ...]:
    """The gradients that AITER computes: never that of alibi_slopes, nor those of some biases."""
    if case.inference:
        return ()
    operands = _with_residuals(case)

    def can(names: tuple[str, ...]) -> bool:
        spec = spec_of(case.backward_options(names), operands)
        return not aiter.not_supported_reasons(spec, device)

    return tuple(name for name in case.differentiable if can((name,)))


def _with_residuals(case: Case) -> Operands:
    """All operands of the backward call, with zeros as out and lse."""
    operands = case.operands() | case.cotangents()
    zeros = np.zeros_like(operands["out_grad"])
    return operands | {"out": zeros, "lse": np.zeros((case.b, case.n, case.t), np.float32)}


def _options_of(case: Case, options: AttentionOptions) -> AttentionOptions:
    return paged_options(case, options) if case.page else options


def _spec_of(case: Case, options: AttentionOptions, operands: Operands) -> AttentionSpec:
    """The spec of the case's call, which may have its keys in pages."""
    if not case.page:
        return spec_of(options, operands)
    arrays = {name: jnp.asarray(x) for name, x in operands.items()}
    return spec_of(paged_options(case, options), in_pages(case, arrays))


def _program(case: Case, device: Device, gradients: tuple[str, ...]) -> Any:
    forward_options, options = case.forward_options(), case.backward_options(gradients)

    @jax.jit
    def both(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        operands = in_pages(case, given) if case.page else given
        out, lse = _forward(_options_of(case, forward_options), operands, device)
        if not gradients:
            return {"out": out, "lse": lse}
        residuals = {"out": out + given["out"], "lse": lse + given["lse"]}
        results = _call(aiter.backward, options, given | residuals, device)
        return {"out": out, "lse": lse, **dict(zip(gradients, results, strict=True))}

    return both


def _forward(options: Any, operands: Any, device: Device) -> tuple[Any, ...]:
    """The forward pass, which is XLA's where AITER runs the backward pass alone."""
    spec = spec_of(options, operands)
    if aiter.not_supported_reasons(spec, device) and not xla.not_supported_reasons(spec, device):
        return xla.forward(spec, device, operands)
    return _call(aiter.forward, options, operands, device)


def _call(function: Any, options: Any, operands: Any, device: Device) -> tuple[Any, ...]:
    """Call aiter.forward or aiter.backward, and check its results against `spec.results`."""
    spec = spec_of(options, operands)
    assert aiter.not_supported_reasons(spec, device) == ()
    results = function(spec, device, {name: operands[name] for name in options.operands})
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in spec.results]
    return results


def _keep_mask(case: Case, emulator: Emulator) -> np.ndarray | None:
    """The emulator's dropout mask, bool [B, N, T, S]; False between sequences of one batch row."""
    if not case.dropout:
        return None
    operands = case.operands()
    spec = spec_of(case.forward_options(), operands)
    words = np.asarray(aiter_arrays.rng_state(spec, jax.tree.map(jnp.asarray, operands)))
    seed, offset = words.view(np.uint64)
    keep = np.zeros((case.b, case.n, case.t, case.s), bool)
    sequences = _sequences(case)
    if not sequences:
        return emulator.keep((int(seed), int(offset)), case.dropout, keep.shape)
    kept = emulator.keep((int(seed), int(offset)), case.dropout, (len(sequences), *keep.shape[1:]))
    for x, (batch_row, queries, keys) in zip(kept, sequences, strict=True):
        shape = (case.n, len(queries), len(keys))
        keep[batch_row][np.ix_(range(case.n), queries, keys)] = x[tuple(map(slice, shape))]
    return keep


def _sequences(case: Case) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """The batch row, queries and keys of each packed sequence, in AITER's order."""
    options, operands = case.forward_options(), case.operands()
    if case.cu_q is not None:
        number = len(case.cu_q[0]) - 1
    elif case.max_segments is not None:
        number = case.max_segments
    else:
        return []
    found = []
    for batch_row in range(case.b):
        ids = segment_ids(options, operands, batch_row)
        found += [(batch_row, *(np.flatnonzero(x == m + 1) for x in ids)) for m in range(number)]
    return found


@contextmanager
def sixteen_bit_atomics() -> Iterator[None]:
    """Let ASM's backward kernels sum the gradient of the queries in 16 bits."""
    choose = aiter_kernels.kernel_for

    def kernel_for(call, *where):
        kernel = choose(call, *where)
        is_asm = call.backward and kernel.family == "asm"
        return replace(kernel, accumulator="atomic_16") if is_asm else kernel

    with mock.patch.object(aiter_kernels, "kernel_for", kernel_for):
        yield
