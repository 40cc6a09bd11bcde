"""A planning process that crashes, hangs, is killed or answers nonsense: the call is refused, and
another process is started."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_dispatch.cudnn import helper_process, planning_process
from attn_dispatch.cudnn.planning_process import PlanningProcess
from tests.support.planning import (
    CUDNN,
    SM90,
    SMALL,
    end,
    native,
    needs_planning_process,
    pid_of,
    state_of,
)

pytestmark = needs_planning_process


def test_crash_refuses_its_call_only(faulty: PlanningProcess):
    plan = faulty.plan(SMALL, SM90)
    for _ in range(2):
        with pytest.raises(faulty.CudnnError) as refusal:
            faulty.plan(SMALL | {"batch": 13}, SM90)
        assert str(refusal.value) == (
            "cuDNN's planning process was ended by signal 11 (Segmentation fault); its "
            "last output: second / third / fourth: assertion failed"
        )
        assert getattr(refusal.value, "code", "") == "library"
    assert faulty.plan(SMALL, SM90) == plan
    assert faulty.cudnn_version() == faulty.load_cudnn("/nowhere")
    assert faulty.cudnn_path() == CUDNN


def test_planning_process_killed_while_idle_refuses_no_call(process: PlanningProcess):
    """The next call did not end the planning process, so another one answers it."""
    first = process.plan(SMALL, SM90)
    os.kill(pid_of(process), signal.SIGKILL)
    time.sleep(0.2)
    assert process.plan(SMALL, SM90) == first


def test_answer_that_is_not_json_is_refused(tmp_path: Path):
    script = tmp_path / "planner.py"
    script.write_text("print('not JSON', flush=True)\nimport time; time.sleep(60)\n")
    process = PlanningProcess(native(), script)
    message = "answered something other than a JSON object: b'not JSON"
    with pytest.raises(process.CudnnError, match=message):
        process.load_cudnn(CUDNN)
    end(process)


def test_planning_process_that_does_not_answer_is_refused_and_ended(
    faulty: PlanningProcess, monkeypatch: pytest.MonkeyPatch
):
    plan = faulty.plan(SMALL, SM90)
    pid = pid_of(faulty)
    monkeypatch.setattr(planning_process, "TIMEOUT", 1.0)
    with pytest.raises(faulty.CudnnError, match=r"cuDNN's planning process did not answer in 1 s$"):
        faulty.plan(SMALL | {"batch": 14}, SM90)
    monkeypatch.undo()
    assert not Path(f"/proc/{pid}").exists()
    assert faulty.plan(SMALL, SM90) == plan


def test_timeout_is_halved_after_each_silence(monkeypatch: pytest.MonkeyPatch):
    """A call can need a dozen plans, and must not wait two minutes for each."""
    monkeypatch.setattr(planning_process, "TIMEOUT", 1.0)
    monkeypatch.setattr(planning_process, "LEAST_TIMEOUT", 0.25)
    monkeypatch.setattr(planning_process, "Helper", lambda _: Silent())
    process = PlanningProcess(native())
    for seconds in ("1", "0.5", "0.25", "0.25"):
        with pytest.raises(process.CudnnError, match=rf"did not answer in {seconds} s$"):
            process.cudnn_version()
    process._times_silent = 2000  # 2^2000 exceeds the range of a float
    with pytest.raises(process.CudnnError, match=r"did not answer in 0.25 s$"):
        process.cudnn_version()


class Silent:
    """A helper that never answers."""

    has_ended = False

    def ask(self, line: bytes, timeout: float) -> bytes:
        raise helper_process.HelperSilent(f"did not answer in {timeout:g} s")

    def end(self) -> None:
        pass


def test_log_of_the_planning_process_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """cuDNN can be set to log everything to stderr."""
    monkeypatch.setattr(helper_process, "_MAX_STDERR", 1000)
    script = tmp_path / "logging_planner.py"
    script.write_text(
        "import sys\nfor line in sys.stdin:\n"
        "    print('x' * 900, file=sys.stderr, flush=True)\n    print('done', flush=True)\n"
    )
    helper = helper_process.Helper((sys.executable, str(script)))
    for _ in range(10):
        assert helper.ask(b"go\n", 30.0) == b"done\n"
    assert os.fstat(helper._stderr.fileno()).st_size <= 1900
    helper.end()


@pytest.fixture
def _handles_sigint() -> Iterator[None]:
    """SIGINT interrupts as in a terminal; a process started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_handles_sigint")
def test_interrupt_does_not_mix_up_answers(faulty: PlanningProcess):
    plan = faulty.plan(SMALL, SM90)
    main = threading.get_ident()
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        faulty.plan(SMALL | {"batch": 14}, SM90)
    timer.join()
    assert faulty.plan(SMALL, SM90) == plan


def test_planning_process_that_does_not_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = tmp_path / "planner.py"
    script.write_text("raise SystemExit('no such library')")
    process = PlanningProcess(native(), script)
    message = r"cuDNN's planning process ended with status 1; its last output: no such library$"
    with pytest.raises(process.CudnnError, match=message):
        process.load_cudnn(CUDNN)
    monkeypatch.setattr(sys, "executable", "")
    process = PlanningProcess(native())
    with pytest.raises(process.CudnnError, match="cuDNN's planning process could not be started: "):
        process.load_cudnn(CUDNN)


def stopped(process: PlanningProcess) -> int:
    """Stop the planning process; return its pid once it is stopped."""
    pid = pid_of(process)
    os.kill(pid, signal.SIGSTOP)
    for _ in range(100):
        if state_of(pid) == "T":
            return pid
        time.sleep(0.05)
    pytest.fail("the planning process does not stop")


@pytest.mark.parametrize("characters", [10, 10**6], ids=["a line", "more than a pipe holds"])
def test_stopped_planning_process_is_refused_at_the_deadline(
    process: PlanningProcess, monkeypatch: pytest.MonkeyPatch, characters: int
):
    plan = process.plan(SMALL, SM90)
    pid = stopped(process)
    monkeypatch.setattr(planning_process, "TIMEOUT", 1.0)
    start = time.monotonic()
    message = r"cuDNN's planning process did not answer in 1 s$"
    with pytest.raises(process.CudnnError, match=message):
        process.import_plan(SMALL, SM90, "x" * characters)
    assert time.monotonic() - start < 60 and state_of(pid) == "Z"
    monkeypatch.undo()
    assert process.plan(SMALL, SM90) == plan


def test_planning_process_killed_while_planning_refuses_its_call(faulty: PlanningProcess):
    """The next call starts another one."""
    plan = faulty.plan(SMALL, SM90)
    timer = threading.Timer(0.5, os.kill, (pid_of(faulty), signal.SIGKILL))
    timer.start()
    message = r"planning process was ended by signal 9 \(Killed\)"
    with pytest.raises(faulty.CudnnError, match=message):
        faulty.plan(SMALL | {"batch": 14}, SM90)
    timer.join()
    assert faulty.plan(SMALL, SM90) == plan


FAULTY_ANSWERS = {
    "endless": ("while True: os.write(1, b'x' * 65536)", "answered more than 67,108,864"),
    "byte by byte": ("while True: os.write(1, b'x'); time.sleep(0.05)", "did not answer in 2 s"),
    "half a line": ("os.write(1, b'[half'); os._exit(0)", "ended with status 0"),
    "two lines": (
        "os.write(1, b'{}\\n{}\\n'); time.sleep(60)",
        "answered something other than a JSON object",
    ),
    "closed input": ("os.close(0); time.sleep(60)", "did not answer in 2 s|closed its output"),
}


@pytest.mark.parametrize("fault", FAULTY_ANSWERS)
def test_faulty_answers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    code, refusal = FAULTY_ANSWERS[fault]
    script = tmp_path / "planner.py"
    script.write_text(f"import os, sys, time\nsys.stdin.readline()\n{code}\n")
    monkeypatch.setattr(planning_process, "TIMEOUT", 20.0 if "more" in refusal else 2.0)
    process = PlanningProcess(native(), script)
    with pytest.raises(process.CudnnError, match=refusal):
        process.load_cudnn(CUDNN)
    assert process._helper is None
