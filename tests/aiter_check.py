"""One case of AITER's, compiled once, to be checked against the float64 reference at will."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from aiter_judge.calls import struct_of
from attn_dispatch import aiter, aiter_arrays, aiter_kernels
from attn_dispatch.aiter_call import AiterCall, call_of
from attn_dispatch.aiter_kernels import Kernel
from attn_dispatch.device import Device
from cases import Case, spec_of
from emulator.native import Emulator
from naive import naive
from reference import Operands, poison_padding, reference


@dataclass(frozen=True)
class Check:
    """A compiled case, what it must compute, and how far off it may be."""

    case: Case
    emulator: Emulator
    compiled: Any
    arrays: dict[str, jax.Array]
    expected: Operands
    allowance: dict[str, float]
    chosen: dict[str, tuple[AiterCall, Kernel]]
    """What AITER is to be asked, forward and, if there is one, backward."""

    @staticmethod
    def of(case: Case, device: Device, emulator: Emulator) -> Check:
        """The forward call, and the backward call for every gradient that AITER can be asked for.

        NaN stands in all padding. `emulator` is the one behind the custom calls.
        """
        gradients = gradients_of(case, device)
        given = _with_residuals(case)
        arrays = {x: jnp.asarray(y) for x, y in poison_padding(given).items()}
        keep = _keep_mask(case, emulator)
        expected = reference(case.forward_options(), given, keep)
        plain = naive(case.forward_options(), given, keep)
        # design.md's rule: twice the error of plain XLA, three times with a soft cap.
        factor = 2 if case.soft_cap is None else 3
        names = ("out", "lse", *gradients)
        allowance = {
            x: factor * error(np.asarray(plain[x], np.float64), expected[x]) + 1e-5 for x in names
        }
        compiled = _program(case, device, gradients).lower(arrays).compile()
        chosen = Check.chosen_for(case, device)
        return Check(case, emulator, compiled, arrays, expected, allowance, chosen)

    @staticmethod
    def chosen_for(case: Case, device: Device) -> dict[str, tuple[AiterCall, Kernel]]:
        """What the front end makes of the case: by direction AITER's call and the kernel."""
        operands = _with_residuals(case)
        options = {"forward": case.forward_options()}
        if gradients := gradients_of(case, device):
            options["backward"] = case.backward_options(gradients)
        calls = {x: call_of(spec_of(y, operands)) for x, y in options.items()}
        return {x: (y, aiter_kernels.kernel_for(y, device.arch)) for x, y in calls.items()}

    def run(self) -> Operands:
        """out, lse and the gradients."""
        return {x: np.asarray(y, np.float64) for x, y in self.compiled(self.arrays).items()}

    def errors(self) -> dict[str, float]:
        """The largest error of each result in units of what is allowed: above 1 is wrong."""
        got = self.run()
        assert got.keys() == self.allowance.keys()
        return {x: error(got[x], self.expected[x]) / self.allowance[x] for x in got}

    def asked_otherwise(self) -> list[str]:
        """Where the last run asked AITER otherwise than the judge of its dispatch does.

        Compared is every field of aiter_api.h, pointers as being null or not, but for the strides
        of a bias, which may be broadcast. Empty is right.
        """
        wrong = []
        for direction, (call, kernel) in self.chosen.items():
            got = self.emulator.last_call(direction)
            expected = struct_of(
                call,
                use_asm=kernel.family == "asm",
                rounding=kernel.bf16_rounding,
                accumulator=kernel.accumulator,
            )
            expected.call.scale = self.case.scale
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
    """The gradients that AITER can be asked for: of alibi_slopes never, of some biases not."""
    operands = _with_residuals(case)

    def can(names: tuple[str, ...]) -> bool:
        spec = spec_of(case.backward_options(names), operands)
        return not aiter.not_supported_reasons(spec, device)

    return tuple(name for name in case.differentiable if can((name,)))


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference; infinite where infinities or NaN are not where they belong."""
    same_infinities = np.array_equal(np.isneginf(got), np.isneginf(expected))
    finite = np.isfinite(expected)
    if not same_infinities or not np.isfinite(got[finite]).all():
        return float("inf")
    return float(np.max(np.abs(got[finite] - expected[finite]), initial=0))


def _with_residuals(case: Case) -> Operands:
    """All operands of the backward call, out and lse being 0."""
    operands = case.operands() | case.cotangents()
    zeros = np.zeros_like(operands["out_grad"])
    return operands | {"out": zeros, "lse": np.zeros((case.b, case.n, case.t), np.float32)}


def _program(case: Case, device: Device, gradients: tuple[str, ...]) -> Any:
    forward_options, options = case.forward_options(), case.backward_options(gradients)

    @jax.jit
    def both(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        out, lse = _call(aiter.forward, forward_options, given, device)
        if not gradients:
            return {"out": out, "lse": lse}
        residuals = {"out": out + given["out"], "lse": lse + given["lse"]}
        results = _call(aiter.backward, options, given | residuals, device)
        return {"out": out, "lse": lse, **dict(zip(gradients, results, strict=True))}

    return both


def _call(function: Any, options: Any, operands: Any, device: Device) -> tuple[Any, ...]:
    """aiter.forward or aiter.backward, its results checked against `spec.results`."""
    spec = spec_of(options, operands)
    assert aiter.not_supported_reasons(spec, device) == ()
    results = function(spec, device, {name: operands[name] for name in options.operands})
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in spec.results]
    return results


def _keep_mask(case: Case, emulator: Emulator) -> np.ndarray | None:
    """The emulator's dropout mask, bool [B, N, T, S]; False between packed sequences."""
    if not case.dropout:
        return None
    operands = case.operands()
    spec = spec_of(case.forward_options(), operands)
    words = np.asarray(aiter_arrays.rng_state(spec, jnp.asarray(operands["dropout_key"])))
    seed, offset = words.view(np.uint64)
    keep = np.zeros((case.b, case.n, case.t, case.s), bool)
    if case.cu_q is None or case.cu_kv is None:
        return emulator.keep((int(seed), int(offset)), case.dropout, keep.shape)
    starts = list(zip(case.cu_q[0], case.cu_kv[0], strict=True))
    longest = (int(np.diff(x).max()) for x in (case.cu_q[0], case.cu_kv[0]))
    shape = (len(starts) - 1, case.n, *longest)
    kept = emulator.keep((int(seed), int(offset)), case.dropout, shape)
    for m, ((t0, s0), (t1, s1)) in enumerate(pairwise(starts)):
        keep[0, :, t0:t1, s0:s1] = kept[m, :, : t1 - t0, : s1 - s0]
    return keep


@contextmanager
def sixteen_bit_atomics() -> Iterator[None]:
    """ASM's backward passes gather the gradient of the queries in 16 bits."""
    choose = aiter_kernels.kernel_for

    def kernel_for(call, arch):
        kernel = choose(call, arch)
        is_asm = call.backward and kernel.family == "asm"
        return replace(kernel, accumulator="atomic_16") if is_asm else kernel

    with mock.patch.object(aiter_kernels, "kernel_for", kernel_for):
        yield
