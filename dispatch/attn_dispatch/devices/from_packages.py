"""An implementation from another package, which defines seven names; the others have defaults.

docs/implementations.md shows one in fifty lines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import UnionType
from typing import Any, cast  # noqa: TID251  # the module of another package

import jax

from attn_dispatch.call.features import unknown_features
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Plan, device_reason
from attn_dispatch.reason import Reason, reason_from_sentence

GROUP = "attn_dispatch.implementations"
"""The group of entry points by which packages announce implementations."""

REQUIRED_NAMES = (
    "NAME",
    "PLATFORM",
    "FEATURES",
    "not_supported_reasons",
    "plan",
    "forward",
    "backward",
)
"""The names that a package's module or object must define."""

_PLATFORMS = ("cuda", "rocm", "cpu")


class FromPackage:
    """An `Implementation` made from another package's module."""

    IS_EXTRA = True

    def __init__(self, entry: EntryPoint, module: Any, failure: str = "") -> None:
        self._module, self._failure = module, failure
        self._package = entry.dist.name if entry.dist else entry.value
        self._version = entry.dist.version if entry.dist else "unknown"
        self.NAME: str = entry.name
        self.PLATFORM: str | None = getattr(module, "PLATFORM", None)
        self.KEEPS_NAN_APART: bool = getattr(module, "KEEPS_NAN_APART", False)
        self.HAS_DECODING_KERNEL: bool = getattr(module, "HAS_DECODING_KERNEL", False)
        self.SKIPS_FROM_BOTTOM_RIGHT: bool = getattr(module, "SKIPS_FROM_BOTTOM_RIGHT", True)
        self.DROPS_BY_POSITION: bool = getattr(module, "DROPS_BY_POSITION", False)

    @staticmethod
    def of(entry: EntryPoint) -> FromPackage:
        """The implementation that an entry point names; if it is unusable, one that says why."""
        try:
            module = entry.load()
        except (Exception, SystemExit) as error:
            return FromPackage(entry, None, f"{type(error).__name__}: {error}")
        missing = ", ".join(name for name in REQUIRED_NAMES if not hasattr(module, name))
        if missing:
            return FromPackage(entry, None, f"{entry.value} lacks {missing}")
        if module.NAME != entry.name:
            return FromPackage(entry, None, f"{entry.value} calls itself {module.NAME!r}")
        if module.PLATFORM not in _PLATFORMS:
            wrong = f"PLATFORM: expected one of {_PLATFORMS}, got {module.PLATFORM!r}"
            return FromPackage(entry, None, wrong)
        if not _is_collection_of(module.FEATURES, str):
            wrong = f"FEATURES: expected a tuple of names, got {module.FEATURES!r}"
            return FromPackage(entry, None, wrong)
        return FromPackage(entry, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def not_supported_reasons(self, spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
        """The package's reasons, and one for each feature of the call that it does not declare.

        If the package gives sentences, the sentence is the reason's rule.
        """
        if reason := self._unusable(device):
            return (reason,)
        reasons = unknown_features(spec, self._module.FEATURES, f"{self.NAME} has none")
        try:
            own = self._module.not_supported_reasons(spec, device)
        except Exception as error:
            return (*reasons, self._failed("not_supported_reasons", error))
        if not _is_collection_of(own, str | Reason):
            wrong = self._malformed("not_supported_reasons", "sentences or Reasons", own)
            return (*reasons, wrong)
        reasons += tuple(
            reason_from_sentence(self.NAME, x) if isinstance(x, str) else x for x in own
        )
        return reasons or self._planning_reasons(spec, device)

    def unusable_reason(self, device: Device) -> str:
        return str(self._unusable(device) or "")

    def _unusable(self, device: Device) -> Reason | None:
        if self._failure:
            text = f"its package {self._package} cannot be used: {self._failure}"
            return Reason(f"{self.NAME}/package", (("failure", self._failure),), text)
        if self.PLATFORM != device.platform:
            text = f"{self.NAME} runs on {self.PLATFORM}, and this is {device}"
            return device_reason("platform", device, text)
        try:
            reason = getattr(self._module, "unusable_reason", _nothing)(device) or ""
        except Exception as error:
            return self._failed("unusable_reason", error)
        if not isinstance(reason, str):
            return self._malformed("unusable_reason", "str", reason)
        return reason_from_sentence(self.NAME, reason) if reason else None

    def _planning_reasons(self, spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
        """The reason against a call that cannot be planned; empty if it can."""
        try:
            plan = self._module.plan(spec, device)
        except Exception as error:
            return (self._failed("plan", error),)
        if isinstance(plan, Plan) and isinstance(plan.workspace_bytes, int):
            return ()
        return (self._malformed("plan", "a Plan", plan),)

    def _failed(self, function: str, error: Exception) -> Reason:
        raised = f"{type(error).__name__}: {error}"
        text = f"{self.NAME}: {function} failed: {raised}"
        return Reason(f"{self.NAME}/{function}", (("raised", raised),), text)

    def _malformed(self, function: str, expected: str, got: object) -> Reason:
        text = f"{self.NAME}: {function}: expected {expected}, got {got!r}"
        return Reason(f"{self.NAME}/{function}", (("got", repr(got)),), text)

    def plan(self, spec: AttentionSpec, device: Device) -> Plan:
        return self._module.plan(spec, device)

    def other_engines(self, spec: AttentionSpec, device: Device) -> tuple[str, ...]:
        return getattr(self._module, "other_engines", _nothing)(spec, device) or ()

    def version(self) -> tuple[str, str]:
        return self._package, self._version

    def library_lines(self) -> list[str]:
        return [f"{self._package} {self._version}{': ' * bool(self._failure)}{self._failure}"]

    def forward(
        self, spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        return self._computed("forward", spec, device, operands)

    def backward(
        self, spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        return self._computed("backward", spec, device, operands)

    def _computed(
        self, function: str, spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        try:
            results = getattr(self._module, function)(spec, device, operands)
        except Exception as error:
            error.add_note(f"in {function} of {self.NAME}, an implementation of {self._package}")
            raise
        return self._checked(spec, function, results)

    def _checked(
        self, spec: AttentionSpec, function: str, results: object
    ) -> tuple[jax.Array, ...]:
        expected = [f"{x.dtype.name}{list(x.shape)}" for x in spec.results]
        got: object = f"a {type(results).__name__}"
        if isinstance(results, list | tuple):
            arrays = cast("Sequence[jax.Array]", results)
            got = [_kind(x) for x in arrays]
            if got == expected:
                return tuple(arrays)
        names = ", ".join(spec.result_names)
        raise TypeError(f"{self.NAME}: {function}: expected {names} as {expected}, got {got}")


def _nothing(*_: object) -> None:
    """Stands in for an optional function that a module does not define."""


def _kind(x: object) -> str:
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        return repr(x)
    array = cast("jax.Array", x)
    return f"{array.dtype.name}{list(array.shape)}"


def _is_collection_of(value: object, kind: type | UnionType) -> bool:
    """Whether the value is a collection whose items are all of this kind."""
    is_collection = isinstance(value, list | tuple | set | frozenset)
    return is_collection and all(isinstance(x, kind) for x in cast("Collection[object]", value))


@lru_cache(maxsize=1)
def installed() -> tuple[FromPackage, ...]:
    """The implementations of all installed packages, in the order of their names, found once."""
    entries = sorted(entry_points(group=GROUP), key=lambda x: x.name)
    by_name = {entry.name: entry for entry in reversed(entries)}
    return tuple(FromPackage.of(entry) for entry in reversed(by_name.values()))
