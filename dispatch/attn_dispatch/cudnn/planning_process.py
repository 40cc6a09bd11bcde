"""The planning process, which plans where there is no CUDA driver. It runs planner.py."""

from __future__ import annotations

import json
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, cast  # noqa: TID251  # a type that JAX does not export

from attn_dispatch.cudnn.call import Attributes
from attn_dispatch.cudnn.helper_process import Helper, HelperEnded, HelperSilent

Answer: TypeAlias = Any
"""A value of JSON, as planner.py writes it."""

PLANNER = Path(__file__).with_name("planner.py")

TIMEOUT = 120.0
"""The seconds that cuDNN may take for a plan. One takes some 300 ms, the first one twice that."""

LEAST_TIMEOUT = 5.0
"""The least timeout in seconds: each timeout that passes halves the next.

One attention call may need a dozen plans and would wait for each.
"""

_EXCEPTIONS = {x.__name__: x for x in (KeyError, TypeError, ValueError)}


class PlanningProcess:
    """The functions of `_cuda`, answered by a `_cuda` in the planning process.

    The first question starts the process; a forked child starts another. It lives until this
    process ends. If cuDNN crashes it, that call gets an error, and the next question starts a new
    one.
    """

    def __init__(self, native: ModuleType, planner: Path = PLANNER) -> None:
        self.CudnnError: type[Exception] = native.CudnnError
        self.ffi_handlers: Callable[[], object] = native.ffi_handlers
        # Any: JAX does not export the type that it wants here.
        self.ffi_state_type: Callable[[], Any] = native.ffi_state_type
        self.set_local_devices: Callable[[list[int]], None] = native.set_local_devices
        # Isolated and without site: no user's packages or startup files, and a faster start.
        self._command = (sys.executable or "", "-I", "-S", str(planner), str(native.__file__))
        self._path = ""
        self._helper: Helper | None = None
        self._lock = threading.Lock()
        self._times_silent = 0
        _ALL.add(self)

    def cudnn_file(self, name: str) -> str:
        """`_cuda.cudnn_file`"""
        with self._lock:
            return self._ask("cudnn_file", name)

    def load_cudnn(self, path: str) -> int:
        """`_cuda.load_cudnn`, with stand-ins for missing libraries allowed."""
        with self._lock:
            version = self._ask("load_cudnn", self._path or path, True)
            self._path = self._path or path
        return version

    def plan(self, attributes: Attributes, device_properties: str) -> tuple[str, int]:
        """`_cuda.plan`; a planning process that crashes raises CudnnError."""
        engine, workspace_bytes = self._ask_loaded("plan", dict(attributes), device_properties)
        return engine, workspace_bytes

    def plan_key(self, attributes: Attributes, device_properties: str) -> str:
        return self._ask_loaded("plan_key", dict(attributes), device_properties)

    def has_plan(self, attributes: Attributes, device_properties: str) -> bool:
        return self._ask_loaded("has_plan", dict(attributes), device_properties)

    def export_plan(self, attributes: Attributes, device_properties: str) -> str:
        return self._ask_loaded("export_plan", dict(attributes), device_properties)

    def import_plan(self, attributes: Attributes, device_properties: str, line: str) -> None:
        self._ask_loaded("import_plan", dict(attributes), device_properties, line)

    def engines(self, attributes: Attributes, device_properties: str) -> str:
        return self._ask_loaded("engines", dict(attributes), device_properties)

    def cudnn_version(self) -> int:
        return self._ask_loaded("cudnn_version")

    def cudnn_path(self) -> str:
        return self._ask_loaded("cudnn_path")

    def plan_cache_stats(self) -> dict[str, int]:
        return self._ask_loaded("plan_cache_stats")

    def driver_is_stand_in(self) -> bool:
        return True

    def device_properties(self, ordinal: int) -> str:
        raise self._error("device", f"device {ordinal}: no CUDA driver library could be loaded")

    def _ask_loaded(self, function: str, *arguments: object) -> Answer:
        with self._lock:
            if self._helper is not None and self._helper.has_ended:
                self._helper.end()  # it ended for a reason other than this question
                self._helper = None
            if self._helper is None and self._path:
                self._ask("load_cudnn", self._path, True)
            return self._ask(function, *arguments)

    def _ask(self, function: str, *arguments: object) -> Answer:
        line = json.dumps([function, arguments]).encode() + b"\n"
        try:
            if self._helper is None:
                self._helper = Helper(self._command)
            answer = _read(self._helper.ask(line, self._timeout))
        except HelperEnded as error:
            self._times_silent += isinstance(error, HelperSilent)
            if self._helper is not None:
                self._helper.end()
            self._helper = None
            raise self._error("library", f"cuDNN's planning process {error}") from error
        except BaseException:
            self._helper = None  # it has ended itself
            raise
        if "value" in answer:
            return answer["value"]
        if answer["error"] == "CudnnError":
            raise self._error(answer["code"], answer["message"])
        raise _EXCEPTIONS.get(answer["error"], RuntimeError)(answer["message"])

    @property
    def _timeout(self) -> float:
        return max(TIMEOUT * 0.5**self._times_silent, min(TIMEOUT, LEAST_TIMEOUT))

    def _error(self, code: str, message: str) -> Exception:
        error = self.CudnnError(message)
        error.code = code  # type: ignore[attr-defined]
        return error

    def after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it
        if self._helper is not None:
            self._helper.abandon()
            self._helper = None


def _read(line: bytes) -> dict[str, Answer]:
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise HelperEnded(f"answered something other than a JSON object: {line[:80]!r}")
    return cast("dict[str, Answer]", answer)


_ALL: weakref.WeakSet[PlanningProcess] = weakref.WeakSet()


def _after_fork() -> None:
    for process in list(_ALL):
        process.after_fork()


os.register_at_fork(after_in_child=_after_fork)
