"""NVIDIA: cuDNN's fused attention. The `_cuda` library plans and runs it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn import arrays as cudnn_arrays
from attn_dispatch.cudnn import engines as cudnn_engines
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.cudnn import plan_store
from attn_dispatch.cudnn import rules as cudnn_rules
from attn_dispatch.cudnn.call import Attribute, CudnnCall, variants_of
from attn_dispatch.cudnn.planning_process import PlanningProcess
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import (
    Plan,
    device_reason,
    library_reason,
    planner_reason,
    platform_reasons,
    require_arch,
)
from attn_dispatch.devices.target import local_nvidia_ordinals
from attn_dispatch.reason import Reason, Rule, reason_from_sentence, sentences

NAME = "cudnn"
PLATFORM = "cuda"
IS_EXTRA = False
KEEPS_NAN_APART = True
DROPS_BY_POSITION = False
HAS_DECODING_KERNEL = True
SKIPS_FROM_BOTTOM_RIGHT = False
FORWARD_TARGET = "attn_dispatch_cudnn_forward"
BACKWARD_TARGET = "attn_dispatch_cudnn_backward"

_OLDEST_SM = 80

_WORKSPACE_SHARE = 4
"""A deterministic backward pass may take this many times the memory of its arrays. An engine that
needs more keeps all scores, whose memory grows with the square of the length."""


def not_supported_reasons(spec: AttentionSpec, device: Device) -> tuple[Reason, ...]:
    """Every rule of this version that the call breaks; if there is none, cuDNN's own reason."""
    reasons = (*_device_reasons(device), *cudnn_rules.not_supported_reasons(spec))
    if reasons:
        return reasons
    planned = _planned(spec, device)
    return () if isinstance(planned, _PlannedCall) else (planned,)


def plan(spec: AttentionSpec, device: Device) -> Plan:
    """cuDNN's engine with its knobs, the workspace, and the memory of copies made for the call."""
    return _must_plan(spec, device).plan


def other_engines(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    """The engines that cuDNN's heuristics propose, and those that differ from one in a single knob.

    Empty for a deterministic backward pass, whose engine the frontend chooses.
    """
    planned = _untuned(spec, device)
    if isinstance(planned, Reason) or (spec.is_backward and spec.meaning.deterministic_backward):
        return ()
    properties = cudnn_library.find().device_properties(device)
    found = _backend().engines(planned.call.attributes, properties)
    return cudnn_engines.similar_engines(spec.options.engine, found)


def unusable_reason(device: Device) -> str:
    return sentences(_device_reasons(device))


def version() -> tuple[str, str]:
    library = cudnn_library.find()
    return "cuDNN", library.version_text if library.is_usable else "not usable"


def library_lines() -> list[str]:
    library = cudnn_library.find()
    path = library.path or "not looked for"
    if not library.is_usable:
        return [f"cuDNN: {library.unusable_reason} [{path}]"]
    driver = "with a driver" if library.can_run else "no CUDA driver here: can plan, cannot run"
    return [f"cuDNN {library.version_text}, {driver} [{path}]"]


def forward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    planned = _must_plan(spec, device)
    arrays = cudnn_arrays.forward_operands(spec, planned.call, operands)
    shapes = cudnn_arrays.forward_shapes(planned.call)
    results = _run(FORWARD_TARGET, planned, arrays, shapes)
    return cudnn_arrays.forward_results(spec, planned.call, operands, results)


def backward(
    spec: AttentionSpec, device: Device, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    planned = _must_plan(spec, device)
    arrays = cudnn_arrays.backward_operands(spec, planned.call, operands)
    shapes = cudnn_arrays.backward_shapes(planned.call)
    results = _run(BACKWARD_TARGET, planned, arrays, shapes)
    return cudnn_arrays.backward_results(spec, planned.call, operands, results)


@lru_cache(maxsize=1)
def register() -> None:
    """Register the custom calls with XLA. Lowering does so itself.

    Only a process that runs an exported module without ever calling attention needs this. It asks
    JAX for its devices, so call it after `jax.distributed.initialize`.

    Raises:
      RuntimeError: if the CUDA library or cuDNN is not usable, with the reason.
    """
    backend = _backend()
    backend.set_local_devices(local_nvidia_ordinals())
    stages, state = backend.ffi_handlers(), backend.ffi_state_type()
    jax.ffi.register_ffi_type("attn_dispatch_cudnn_call_site", state, platform="CUDA")
    for target in (FORWARD_TARGET, BACKWARD_TARGET):
        jax.ffi.register_ffi_target(target, stages, platform="CUDA")


def _device_reasons(device: Device) -> tuple[Reason, ...]:
    if elsewhere := platform_reasons("cuDNN", PLATFORM, device):
        return elsewhere
    require_arch(device)
    reasons: list[Reason] = []
    if int(device.arch[2:]) < _OLDEST_SM:
        needs = f"needs compute capability sm{_OLDEST_SM} or newer, and this is {device}"
        reasons.append(device_reason("arch", device, needs))
    library = cudnn_library.find()
    if not library.is_usable:
        reasons.append(
            library_reason("cudnn/library", library.unusable_reason)
            if device.is_present
            else _planner_reason(library)
        )
    return tuple(reasons)


def _planner_reason(library: cudnn_library.CudnnLibrary) -> Reason:
    """Why cuDNN cannot be asked about a device that is not here."""
    missing = library.missing
    why = library.unusable_reason if missing is None else missing.what
    install = "" if missing is None else missing.install
    return planner_reason(NAME, f"cuDNN's planner is not here: {why}", install)


@dataclass(frozen=True)
class _PlannedCall:
    call: CudnnCall
    plan: Plan


def _planned(spec: AttentionSpec, device: Device) -> _PlannedCall | Reason:
    """The call as cuDNN runs it, with the engine that tuning chose, or why it does not run it."""
    untuned = _untuned(spec, device)
    if isinstance(untuned, Reason) or not spec.options.engine:
        return untuned
    backend, call = _backend(), replace(untuned.call, engine=spec.options.engine)
    properties = cudnn_library.find().device_properties(device)
    try:
        engine, workspace_bytes = plan_store.plan(backend, call.attributes, properties)
    except backend.CudnnError as error:
        version = cudnn_library.find().version_text
        return reason_from_sentence(
            "cudnn/engine", f"engine {call.engine}: {error} (cuDNN {version})"
        )
    # Enough for the untuned plan too: where another cuDNN lacks the engine, that plan runs.
    workspace_bytes = max(workspace_bytes, untuned.plan.workspace_bytes)
    return _PlannedCall(call, _plan(engine, workspace_bytes, untuned.plan.other_bytes))


def _plan(engine: str, workspace_bytes: int, other_bytes: int) -> Plan:
    return Plan(engine, workspace_bytes, other_bytes, engine_is_code=True)


def _untuned(spec: AttentionSpec, device: Device) -> _PlannedCall | Reason:
    """The first variant of the call that cuDNN plans, or the reason against the first variant."""
    backend, first_reason = _backend(), None
    library = cudnn_library.find()
    properties = library.device_properties(device)
    for call in variants_of(spec):
        is_whole = spec.promises.whole_pages
        if reason := cudnn_rules.variant_reason(call, device.arch, whole_pages=is_whole):
            first_reason = first_reason or reason
            continue
        try:
            engine, workspace_bytes = plan_store.plan(backend, call.attributes, properties)
        except backend.CudnnError as error:
            first_reason = first_reason or _planning_reason(str(error), library.version_text, call)
            continue
        is_limited = call.backward and call.deterministic
        if is_limited and workspace_bytes > (limit := _workspace_limit(spec)):
            needed = _Workspace(library.version_text, workspace_bytes, limit)
            first_reason = first_reason or _WORKSPACE.reason(needed)
            continue
        extra_bytes = cudnn_arrays.extra_bytes(spec, call)
        return _PlannedCall(call, _plan(engine, workspace_bytes, extra_bytes))
    assert first_reason is not None, "every call has a variant"
    return first_reason


@dataclass(frozen=True)
class _Workspace:
    """The bytes of a plan's workspace, and the most that are allowed."""

    version: str
    bytes: int
    limit: int


_WORKSPACE = Rule[_Workspace](
    "cudnn/workspace",
    lambda x: x.bytes > x.limit,
    "deterministic_backward: cuDNN {version} would need a workspace of {bytes:,} bytes, and "
    "{limit:,} is what is allowed",
    facts=asdict,
)


_KNOWN_BUG = re.compile(r"known bug (\w+) of cuDNN \d+: ")


_QUOTES_CODE = re.compile(r"kcfg\.|is_dropout &&")
"""Signs that cuDNN's error only quotes a condition from its source, for the last engine tried."""


def _planning_reason(error: str, version: str, call: CudnnCall) -> Reason:
    """The reason in an error of planning.

    For known bugs, which are refused before cuDNN is asked, the rule is `cudnn/known_bug/` and the
    names of the rows of known_bad.cc that match. Otherwise the sentence is cuDNN's error without
    the names of nodes or, if it only quotes a condition, that no engine computes the call.
    """
    if _KNOWN_BUG.match(error):
        names = " and ".join(_KNOWN_BUG.findall(error))
        facts = (("version", version),)
        return Reason(f"cudnn/known_bug/{names}", facts, f"{error} (cuDNN {version})")
    if _QUOTES_CODE.search(error):
        has_both = call.needs_dbias and call.dropout_rate
        what = "dropout with the gradient of bias" if has_both else "this combination of options"
        text = f"{what}: no engine of cuDNN {version} computes it on this device ({error})"
        return Reason(f"cudnn/no_engine/{what}", (("version", version),), text)
    return reason_from_sentence("cudnn/plan", f"{re.sub(r' for _+', '', error)} (cuDNN {version})")


def _must_plan(spec: AttentionSpec, device: Device) -> _PlannedCall:
    planned = _planned(spec, device)
    if isinstance(planned, Reason):
        raise NotImplementedError(str(planned))
    return planned


def _workspace_limit(spec: AttentionSpec) -> int:
    """The most bytes of a deterministic backward pass's workspace, linear in the lengths."""
    arrays = ("query", "key", "value", "out", "out_grad")
    elements = sum(math.prod(spec.shape(name)) for name in arrays)
    return _WORKSPACE_SHARE * elements * 2 + 2**24


def _backend() -> ModuleType | PlanningProcess:
    library = cudnn_library.find()
    if library.backend is None:
        raise RuntimeError(library.unusable_reason)
    return library.backend


def _run(
    target: str,
    planned: _PlannedCall,
    operands: list[jax.Array],
    shapes: dict[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    register()
    workspace = jax.ShapeDtypeStruct((planned.plan.workspace_bytes,), jnp.uint8)
    call = jax.ffi.ffi_call(target, [*shapes.values(), workspace])
    results = call(*operands, **_ffi_attributes(planned.call))
    return dict(zip(shapes, results[:-1], strict=True))


def _ffi_attributes(call: CudnnCall) -> dict[str, bool | str | np.generic]:
    return {name: _as_attribute(value) for name, value in call.attributes.items()}


def _as_attribute(value: Attribute) -> bool | str | np.generic:
    """The value in the type of its field in cuda_backend/spec.h."""
    if isinstance(value, bool | str):
        return value
    return np.int64(value) if isinstance(value, int) else np.float32(value)
