"""Planning without a driver, in a process that loads cuDNN and stand-in libraries."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.cudnn.planning_process import PlanningProcess
from tests.support.backend import needs_no_driver
from tests.support.compiled import library, needs_compiler
from tests.support.planning import (
    CUDNN,
    SM90,
    SMALL,
    end,
    native,
    needs_planning_process,
    output_of,
    pid_of,
    run,
    state_of,
)

pytestmark = needs_planning_process


@needs_no_driver
@needs_compiler
def test_real_libraries_load_after_planning(tmp_path: Path):
    """Libraries of another framework load after planning and find each other, not the stand-ins."""
    names = ("libcublasLt.so.13", "libcublasLt.so.12", "libcuda.so.1")
    for name in names:
        function = f'extern "C" int only_in_the_real_one() {{ return {len(name)}; }}'
        real = library(tmp_path / name, function)
        dependent = 'extern "C" int only_in_the_real_one(); extern "C" int ask() '
        dependent += "{ return only_in_the_real_one(); }"
        library(tmp_path / f"user_of_{name}", dependent, real, f"-Wl,-rpath,{tmp_path}")
    lines = output_of(
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
    assert lines == ["cudnn", "[]", *(str(len(name)) for name in names)]


def test_planning_process_gives_the_plans_of_the_library(process: PlanningProcess):
    """Several threads of one process plan with the library; a planning process plans one by one."""
    lengths = (128, 256, 384, 512)
    code = """
        import threading
        import attn_dispatch._cuda as native
        from tests.support.planning import SM90, SMALL
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


def test_threads_share_one_planning_process(process: PlanningProcess):
    """Equal calls are built once, different calls get different plans."""
    calls = [SMALL | {"seq_len_q": length} for length in (128, 256, 128, 256, 384, 128)]
    plans: dict[int, Any] = {}
    start = threading.Barrier(len(calls))

    def plan(i: int) -> None:
        start.wait()
        plans[i] = process.plan(calls[i], SM90)

    threads = [threading.Thread(target=plan, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = process.plan_cache_stats()
    assert (stats["builds"], stats["hits"]) == (3, 3)
    pid = pid_of(process)
    assert plans == {i: process.plan(attributes, SM90) for i, attributes in enumerate(calls)}
    assert pid_of(process) == pid


FORKING_PROGRAM = """
import os, threading
import attn_dispatch, attn_dispatch._cuda as native
from tests.support.planning import CUDNN, SM90, SMALL, pid_of
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

def leave():  # the normal end of a program
    sys.exit(0)

forked(256, leave)
process.load_cudnn(CUDNN)
print("parent", process.plan(SMALL, SM90)[0][:3], flush=True)
pid = pid_of(process)
forked(256, leave)
forked(384, lambda: os._exit(0))
with process._lock:  # as if another thread waited for an answer
    forked(256, leave)
process.plan(SMALL, SM90)
print("parent", process.plan_cache_stats()["builds"], pid_of(process) == pid)
"""


def test_forked_process_starts_its_own_planning_process():
    """Forked after import, after planning, and while a thread plans; the parent's process stays."""
    done = run(FORKING_PROGRAM, PYTHONWARNINGS="ignore")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    child = ["child eng 1", "ended with 0"]
    assert done.stdout.splitlines() == [*child, "parent eng", *3 * child, "parent 1 True"]


def test_planning_process_outlives_the_thread_that_started_it():
    """The operating system ends a planning process with the thread that started it, so that is not
    the caller's thread."""
    process = PlanningProcess(native())
    thread = threading.Thread(target=process.load_cudnn, args=(CUDNN,))
    thread.start()
    thread.join()
    pid = pid_of(process)
    time.sleep(0.5)
    process.plan(SMALL, SM90)
    assert pid_of(process) == pid and state_of(pid) != "Z"
    end(process)


PLANNING_PROGRAM = """
import os, signal, warnings
warnings.simplefilter("error")
import attn_dispatch, attn_dispatch._cuda as native
from tests.support.planning import CUDNN, SM90, SMALL, pid_of
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
    "ending", ["", GONE, KILLED, STOPPED], ids=["exit", "dropped", "killed", "stopped"]
)
def test_planning_process_ends_with_its_parent_process(ending: str):
    """Even a stopped planning process, which does not see that its input has ended."""
    done = run(PLANNING_PROGRAM + ending)
    assert done.stderr == "" and done.returncode == (-9 if KILLED in ending else 0)
    for _ in range(100):
        if state_of(done.stdout.strip()) == "Z":
            return  # a zombie is left to its new parent
        time.sleep(0.1)
    os.kill(int(done.stdout), signal.SIGKILL)
    pytest.fail("the planning process still runs")


def test_planning_process_is_not_started_before_it_is_needed():
    lines = output_of(
        """
        import attn_dispatch, jax.numpy as jnp
        from attn_dispatch.cudnn import library
        x = jnp.ones((1, 4, 1, 8))
        attn_dispatch.dot_product_attention(x, x, x)
        print(library._load.cache_info().misses)
        """
    )
    assert lines == ["0"]
