"""Planning without a driver: the process that loads cuDNN and the stand-ins, and its ends."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.cudnn import helper_process, planning_process
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.cudnn.planning_process import PLANNER, PlanningProcess
from attn_dispatch.devices.target import parse
from tests.support.backend import needs_no_driver
from tests.support.compiled import library, needs_compiler
from tests.support.cudnn_calls import cudnn_attributes
from tests.support.repository import ROOT

CUDNN = cudnn_library._locate()

# Not needs_cudnn: a helper that does not start must fail here.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("attn_dispatch._cuda") is None or not Path(CUDNN).exists(),
    reason="needs attn_dispatch._cuda and cuDNN",
)

SM90 = parse("sm90").properties or ""
SMALL = cudnn_attributes(batch=1, num_heads=2, num_kv_heads=2, seq_len_q=128, seq_len_kv=128)

ODD_PLANNER = f"""
import os, signal, sys, time
sys.path.insert(0, {str(PLANNER.parent)!r})
import planner
real = planner.answer

def answer(backend, line):
    if '"batch": 13' in line:
        print("first", "second", "third", "fourth: assertion failed", sep="\\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    if '"batch": 14' in line:
        time.sleep(60)
    return real(backend, line)

planner.answer = answer
planner.main()
"""
"""The planner, which batches of 13 crash and batches of 14 keep busy."""


def native() -> Any:
    return importlib.import_module("attn_dispatch._cuda")


@pytest.fixture
def process() -> Iterator[PlanningProcess]:
    process = PlanningProcess(native())
    assert process.load_cudnn(CUDNN) >= 91200
    yield process
    end(process)


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[PlanningProcess]:
    script = tmp_path / "odd_planner.py"
    script.write_text(ODD_PLANNER)
    process = PlanningProcess(native(), script)
    process.load_cudnn(CUDNN)
    yield process
    end(process)


def end(process: PlanningProcess) -> None:
    if process._helper is not None:
        process._helper.end()


def pid_of(process: PlanningProcess) -> int:
    assert process._helper is not None
    return process._helper._process.pid


def run(code: str, *arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the code in a new process, with the repository on its path."""
    code = "import sys; sys.path.insert(0, sys.argv[1])\n" + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", code, ROOT, *arguments],
        capture_output=True, text=True, timeout=300, env=os.environ | changes,
    )  # fmt: skip


def output_of(code: str, *arguments: str | Path, **changes: str) -> list[str]:
    done = run(code, *arguments, **changes)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()


@needs_no_driver
@needs_compiler
def test_nothing_stands_in_the_way_of_a_real_library(tmp_path: Path):
    """The libraries that another framework brings load after planning, and find each other."""
    names = ("libcublasLt.so.13", "libcublasLt.so.12", "libcuda.so.1")
    for name in names:
        function = f'extern "C" int only_in_the_real_one() {{ return {len(name)}; }}'
        real = library(tmp_path / name, function)
        user = 'extern "C" int only_in_the_real_one(); extern "C" int ask() '
        user += "{ return only_in_the_real_one(); }"
        library(tmp_path / f"user_of_{name}", user, real, f"-Wl,-rpath,{tmp_path}")
    said = output_of(
        """
        import ctypes, pathlib
        import jax, jax.numpy as jnp
        from attn_dispatch import explain
        q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
        explanation = explain(q, q, q, target="sm90")
        print(explanation.chosen_forward)
        maps = pathlib.Path("/proc/self/maps").read_text()
        print([x for x in ("libattn_dispatch_no", "libcudnn", "libcuda", "cublas") if x in maps])
        for name in sys.argv[3:]:
            print(ctypes.CDLL(f"{sys.argv[2]}/user_of_{name}").ask())
        """,
        tmp_path, *names,
    )  # fmt: skip
    assert said == ["cudnn", "[]", *(str(len(name)) for name in names)]


def test_the_answers_are_the_librarys_own(process: PlanningProcess):
    """Planned in one process by several threads at once, and here one after the other."""
    lengths = (128, 256, 384, 512)
    code = """
        import threading
        import attn_dispatch._cuda as native
        from tests.cudnn.test_planning_process import SM90, SMALL
        native.load_cudnn(sys.argv[2], allow_stand_ins=True)
        lengths = 3 * [int(x) for x in sys.argv[3:]]
        plans = [None] * len(lengths)
        start = threading.Barrier(len(lengths))

        def plan(i):
            start.wait()
            plans[i] = native.plan(SMALL | {"seq_len_q": lengths[i]}, SM90)

        threads = [threading.Thread(target=plan, args=(i,)) for i in range(len(lengths))]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(*plans, native.plan_cache_stats()["builds"], sep="\\n")
        """
    *planned, builds = output_of(code, CUDNN, *map(str, lengths))
    alone = [str(process.plan(SMALL | {"seq_len_q": length}, SM90)) for length in lengths]
    assert planned == 3 * alone and int(builds) == len(lengths)


def test_threads_share_one_process(process: PlanningProcess):
    """What they ask at once: the same call is built once, different calls get their own plans."""
    asked = [SMALL | {"seq_len_q": length} for length in (128, 256, 128, 256, 384, 128)]
    plans: dict[int, Any] = {}
    start = threading.Barrier(len(asked))

    def plan(i: int) -> None:
        start.wait()
        plans[i] = process.plan(asked[i], SM90)

    threads = [threading.Thread(target=plan, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = process.plan_cache_stats()
    assert (stats["builds"], stats["hits"]) == (3, 3)
    pid = pid_of(process)
    assert plans == {i: process.plan(attributes, SM90) for i, attributes in enumerate(asked)}
    assert pid_of(process) == pid


def test_a_crash_is_a_refusal_of_its_call_alone(odd: PlanningProcess):
    plan = odd.plan(SMALL, SM90)
    for _ in range(2):
        with pytest.raises(odd.CudnnError) as refusal:
            odd.plan(SMALL | {"batch": 13}, SM90)
        assert str(refusal.value) == (
            "the process in which cuDNN plans was ended by signal 11 (Segmentation fault); its "
            "last output: second / third / fourth: assertion failed"
        )
        assert getattr(refusal.value, "code", "") == "library"
    assert odd.plan(SMALL, SM90) == plan
    assert odd.cudnn_version() == odd.load_cudnn("/nowhere") and odd.cudnn_path() == CUDNN


def test_one_that_was_ended_while_idle_is_no_refusal(process: PlanningProcess):
    """Whoever ended it: what is asked next did not."""
    first = process.plan(SMALL, SM90)
    os.kill(pid_of(process), signal.SIGKILL)
    time.sleep(0.2)
    assert process.plan(SMALL, SM90) == first


def test_an_answer_that_is_none(tmp_path: Path):
    script = tmp_path / "planner.py"
    script.write_text("print('not JSON', flush=True)\nimport time; time.sleep(60)\n")
    process = PlanningProcess(native(), script)
    with pytest.raises(process.CudnnError, match="answered a line that is no answer: b'not JSON"):
        process.load_cudnn(CUDNN)
    end(process)


def test_silence_is_a_refusal(odd: PlanningProcess, monkeypatch: pytest.MonkeyPatch):
    plan = odd.plan(SMALL, SM90)
    pid = pid_of(odd)
    monkeypatch.setattr(planning_process, "TIMEOUT", 1.0)
    with pytest.raises(odd.CudnnError, match=r"cuDNN plans did not answer in 1 s$"):
        odd.plan(SMALL | {"batch": 14}, SM90)
    monkeypatch.undo()
    assert not Path(f"/proc/{pid}").exists()
    assert odd.plan(SMALL, SM90) == plan


def test_silence_costs_less_each_time(monkeypatch: pytest.MonkeyPatch):
    """A call may ask for a dozen plans, and must not wait two minutes for each."""
    monkeypatch.setattr(planning_process, "TIMEOUT", 1.0)
    monkeypatch.setattr(planning_process, "LEAST_TIMEOUT", 0.25)
    monkeypatch.setattr(planning_process, "Helper", lambda _: Silent())
    process = PlanningProcess(native())
    for seconds in ("1", "0.5", "0.25", "0.25"):
        with pytest.raises(process.CudnnError, match=rf"did not answer in {seconds} s$"):
            process.cudnn_version()
    process._times_silent = 2000  # the time that is left is no float's any more
    with pytest.raises(process.CudnnError, match=r"did not answer in 0.25 s$"):
        process.cudnn_version()


class Silent:
    """A helper that answers nothing."""

    has_ended = False

    def ask(self, line: bytes, timeout: float) -> bytes:
        raise helper_process.HelperSilent(f"did not answer in {timeout:g} s")

    def end(self) -> None:
        pass


def test_what_it_logs_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """cuDNN may be set to log all it does to stderr."""
    monkeypatch.setattr(helper_process, "_MAX_STDERR", 1000)
    script = tmp_path / "talker.py"
    script.write_text(
        "import sys\nfor line in sys.stdin:\n"
        "    print('x' * 900, file=sys.stderr, flush=True)\n    print('done', flush=True)\n"
    )
    talker = helper_process.Helper((sys.executable, str(script)))
    for _ in range(10):
        assert talker.ask(b"go\n", 30.0) == b"done\n"
    assert os.fstat(talker._stderr.fileno()).st_size <= 1900
    talker.end()


@pytest.fixture
def _takes_sigint() -> Iterator[None]:
    """As in a terminal: a process that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_takes_sigint")
def test_interrupting_does_not_mix_up_answers(odd: PlanningProcess):
    plan = odd.plan(SMALL, SM90)
    main = threading.get_ident()
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        odd.plan(SMALL | {"batch": 14}, SM90)
    timer.join()
    assert odd.plan(SMALL, SM90) == plan


def test_a_planner_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "planner.py"
    script.write_text("raise SystemExit('no such library')")
    process = PlanningProcess(native(), script)
    said = r"cuDNN plans ended with status 1; its last output: no such library$"
    with pytest.raises(process.CudnnError, match=said):
        process.load_cudnn(CUDNN)
    monkeypatch.setattr(sys, "executable", "")
    process = PlanningProcess(native())
    with pytest.raises(process.CudnnError, match="cuDNN plans could not be started: "):
        process.load_cudnn(CUDNN)


FORKS = """
import os, threading
import attn_dispatch, attn_dispatch._cuda as native
from tests.cudnn.test_planning_process import CUDNN, SM90, SMALL, pid_of
from attn_dispatch.cudnn.planning_process import PlanningProcess
process = PlanningProcess(native)

def forked(length, leave):
    child = os.fork()
    if child == 0:
        process.load_cudnn(CUDNN)
        print("child", process.plan(SMALL | {"seq_len_q": length}, SM90)[0][:3],
              process.plan_cache_stats()["builds"], flush=True)
        leave()
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

def leave():  # as a program ends
    sys.exit(0)

forked(256, leave)
process.load_cudnn(CUDNN)
print("parent", process.plan(SMALL, SM90)[0][:3], flush=True)
pid = pid_of(process)
forked(256, leave)
forked(384, lambda: os._exit(0))
with process._lock:  # another thread is being answered
    forked(256, leave)
process.plan(SMALL, SM90)
print("parent", process.plan_cache_stats()["builds"], pid_of(process) == pid)
"""


def test_forked_processes_plan_for_themselves():
    """After import, after planning, and while a thread plans; the parent's helper is untouched."""
    done = run(FORKS, PYTHONWARNINGS="ignore")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    child = ["child eng 1", "ended with 0"]
    assert done.stdout.splitlines() == [*child, "parent eng", *3 * child, "parent 1 True"]


def stopped(process: PlanningProcess) -> int:
    """Its pid, once it is stopped."""
    pid = pid_of(process)
    os.kill(pid, signal.SIGSTOP)
    for _ in range(100):
        if state_of(pid) == "T":
            return pid
        time.sleep(0.05)
    pytest.fail("it does not stop")


def state_of(pid: int | str) -> str:
    """As ps has it; Z, a zombie, for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


@pytest.mark.parametrize("characters", [10, 10**6], ids=["a line", "more than a pipe holds"])
def test_asking_a_stopped_planner_has_an_end(
    process: PlanningProcess, monkeypatch: pytest.MonkeyPatch, characters: int
):
    plan = process.plan(SMALL, SM90)
    pid = stopped(process)
    monkeypatch.setattr(planning_process, "TIMEOUT", 1.0)
    began = time.monotonic()
    with pytest.raises(process.CudnnError, match=r"cuDNN plans did not answer in 1 s$"):
        process.import_plan(SMALL, SM90, "x" * characters)
    assert time.monotonic() - began < 60 and state_of(pid) == "Z"
    monkeypatch.undo()
    assert process.plan(SMALL, SM90) == plan


def test_killed_while_it_plans(odd: PlanningProcess):
    """The call gets an error; the next call starts another process."""
    plan = odd.plan(SMALL, SM90)
    timer = threading.Timer(0.5, os.kill, (pid_of(odd), signal.SIGKILL))
    timer.start()
    with pytest.raises(odd.CudnnError, match=r"plans was ended by signal 9 \(Killed\)"):
        odd.plan(SMALL | {"batch": 14}, SM90)
    timer.join()
    assert odd.plan(SMALL, SM90) == plan


ANSWERS = {
    "without an end": ("while True: os.write(1, b'x' * 65536)", "answered more than 67,108,864"),
    "in drops": ("while True: os.write(1, b'x'); time.sleep(0.05)", "did not answer in 2 s"),
    "in half": ("os.write(1, b'[half'); os._exit(0)", "ended with status 0"),
    "of two lines": (
        "os.write(1, b'{}\\n{}\\n'); time.sleep(60)",
        "answered a line that is no answer",
    ),
    "to closed input": ("os.close(0); time.sleep(60)", "did not answer in 2 s|closed its output"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_odd_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str):
    code, refusal = ANSWERS[answer]
    script = tmp_path / "planner.py"
    script.write_text(f"import os, sys, time\nsys.stdin.readline()\n{code}\n")
    monkeypatch.setattr(planning_process, "TIMEOUT", 20.0 if "more" in refusal else 2.0)
    process = PlanningProcess(native(), script)
    with pytest.raises(process.CudnnError, match=refusal):
        process.load_cudnn(CUDNN)
    assert process._helper is None


def test_it_outlives_the_thread_that_asked_first():
    """The kernel ends it with its parent, which is the thread that started it."""
    process = PlanningProcess(native())
    thread = threading.Thread(target=process.load_cudnn, args=(CUDNN,))
    thread.start()
    thread.join()
    pid = pid_of(process)
    time.sleep(0.5)
    process.plan(SMALL, SM90)
    assert pid_of(process) == pid and state_of(pid) != "Z"
    end(process)


ENDS = """
import os, signal, warnings
warnings.simplefilter("error")
import attn_dispatch, attn_dispatch._cuda as native
from tests.cudnn.test_planning_process import CUDNN, SM90, SMALL, pid_of
from attn_dispatch.cudnn.planning_process import PlanningProcess
process = PlanningProcess(native)
process.load_cudnn(CUDNN)
process.plan(SMALL, SM90)
pid = pid_of(process)
print(pid, flush=True)
"""
GONE = "del process; assert not os.path.exists(f'/proc/{pid}')"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
STOPPED = "os.kill(pid, signal.SIGSTOP); " + KILLED


@pytest.mark.parametrize(
    "way", ["", GONE, KILLED, STOPPED], ids=["exit", "dropped", "killed", "stopped"]
)
def test_it_ends_with_the_process_that_started_it(way: str):
    """A stopped one too, which does not see that its input has ended."""
    done = run(ENDS + way)
    assert done.stderr == "" and done.returncode == (-9 if KILLED in way else 0)
    for _ in range(100):
        if state_of(done.stdout.strip()) == "Z":
            return  # a zombie is its new parent's to bury
        time.sleep(0.1)
    os.kill(int(done.stdout), signal.SIGKILL)
    pytest.fail("it still runs")


def test_nothing_is_started_before_it_is_needed():
    said = output_of(
        """
        import attn_dispatch, jax.numpy as jnp
        from attn_dispatch.cudnn import library
        x = jnp.ones((1, 4, 1, 8))
        attn_dispatch.dot_product_attention(x, x, x)
        print(library._load.cache_info().misses)
        """
    )
    assert said == ["0"]
