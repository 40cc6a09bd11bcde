"""The CUDA library in a process that ends, is forked, or finds only part of cuDNN.

Each test starts a process, with a limit on its time. cuDNN is loaded in that process itself, as it
is where there is a driver; where there is none, the stand-ins take the driver's place.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.cudnn.planning_process import PLANNER
from attn_dispatch.devices.target import parse
from tests.support.cudnn_calls import cudnn_attributes
from tests.support.part_of_cudnn import part_of_cudnn
from tests.support.subinterpreter import import_error

CUDNN = cudnn_library._locate()
SMALL = {"batch": 1, "num_heads": 2, "num_kv_heads": 2, "seq_len_q": 128, "seq_len_kv": 128}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("attn_dispatch._cuda") is None or not Path(CUDNN).exists(),
    reason="needs attn_dispatch._cuda and cuDNN",
)

BEGIN = """
import json, os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import planner
native = planner.load(sys.argv[2])
SMALL, SM90 = json.loads(sys.argv[3])

def plan(length):
    try:
        return native.plan(SMALL | {"seq_len_q": length}, SM90)[1]
    except native.CudnnError as error:
        return f"{error.code}: {error}"

def plan_forever(first):
    length = first
    while True:
        length += 64
        if "ending" in str(plan(length)):
            time.sleep(0.01)

def load():
    native.load_cudnn(sys.argv[4], allow_stand_ins=True)

def start_planning():
    for first in range(128, 160, 8):
        threading.Thread(target=plan_forever, args=(first,), daemon=True).start()
    while native.plan_cache_stats()["builds"] < 4:
        time.sleep(0.01)

def forked(function):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        print(function(), flush=True)
        sys.exit(5)
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run(code: str, cudnn: str | Path = CUDNN) -> subprocess.CompletedProcess[str]:
    # The process does without JAX, which takes longer to import than the rest takes to run.
    library = str(importlib.import_module("attn_dispatch._cuda").__file__)
    call = json.dumps([cudnn_attributes(**SMALL), parse("sm90").properties])
    # Python 3.12 warns of a fork while threads run, which some of these tests do on purpose.
    warnings = ("-W", "ignore:This process:DeprecationWarning")
    command = [sys.executable, *warnings, "-c", BEGIN + textwrap.dedent(code)]
    command += [str(PLANNER.parent), library, call]
    return subprocess.run([*command, str(cudnn)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "end", ["sys.exit(3)", "raise SystemExit(3)", "native.before_exit(60_000)"]
)
def test_exit_waits_for_threads_that_plan(end: str):
    """The exit waits for the plans under way, and no thread can begin another."""
    done = run(f"load()\nstart_planning()\n{end}\nsys.exit(3)")
    assert (done.returncode, done.stderr) == (3, "")


def test_exit_does_not_wait_longer_than_its_limit():
    """The process then ends without the thread, and without running cuDNN's destructors."""
    done = run("load()\nstart_planning()\nnative.before_exit(1)\nprint('end')\nsys.exit(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, "end\n", "")


def test_destructors_registered_after_the_limit_do_not_run():
    """A thread that is still inside can load a library and so register destructors."""
    done = run("""
        import ctypes
        libc = ctypes.CDLL(None)
        load()
        start_planning()
        native.before_exit(1)
        libc.on_exit(libc.abort, None)
        sys.exit(3)
        """)
    assert (done.returncode, done.stderr) == (3, "")


def test_exit_does_not_wait_for_threads_that_are_refused():
    """A thread that tries again and again to enter is not counted as inside.

    The test exits a hundred times, since the exit rarely comes just when a thread tries to enter.
    """
    done = run("""
        def ask():
            while True:
                try: native.has_driver()
                except native.CudnnError: pass

        def end():
            for _ in range(2): threading.Thread(target=ask, daemon=True).start()
            time.sleep(0.005)
            start = time.monotonic()
            native.before_exit(5_000)
            os._exit(time.monotonic() - start > 4)

        print(sum(os.waitpid(os.fork() or end(), 0)[1] for _ in range(100)))
        """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_the_thread_that_ends_the_process_can_still_plan():
    done = run("""
        import atexit
        load()
        atexit._run_exitfuncs()
        print(plan(128))
        other = threading.Thread(target=lambda: print(plan(136)))
        other.start(); other.join()
        """)
    assert done.stderr == "" and done.returncode == 0
    bytes_, other = done.stdout.splitlines()
    assert bytes_.isdigit() and other == "library: the process is ending"


def test_a_child_forked_while_threads_plan_is_refused():
    """The refusal is a sentence, for cached plans too, and the child ends without help."""
    done = run("""
        load()
        start_planning()
        plan(64)
        forked(lambda: plan(64))
        forked(lambda: plan(72))
        print(plan(80))
        """)
    assert (done.returncode, done.stderr) == (0, "")
    child = [done.stdout.splitlines()[0], "ended with 5"]
    assert child[0].startswith(
        "library: cuDNN was in use when this process was forked, and neither"
    )
    *children, parent = done.stdout.splitlines()
    assert children == 2 * child and parent.isdigit()


def test_a_child_forked_before_any_plan_can_plan():
    done = run("""
        forked(lambda: load() or plan(64))
        load()
        print(plan(64))
        """)
    assert (done.returncode, done.stderr) == (0, "")
    child, ended, parent = done.stdout.splitlines()
    assert child == parent and child.isdigit() and ended == "ended with 5"


PARTS = ("graph", "engines_runtime_compiled", "engines_precompiled", "heuristic", "ops")


@pytest.mark.parametrize("real", [CUDNN, os.environ.get("ATTN_DISPATCH_TEST_CUDNN", "")])
@pytest.mark.parametrize("missing", [*((x,) for x in PARTS), PARTS], ids=lambda x: x[-1])
def test_a_cudnn_without_some_of_its_libraries_plans_or_is_refused(
    tmp_path: Path, real: str, missing: tuple[str, ...]
):
    """The refusal names the missing library; in neither case does the process crash."""
    if not real:
        pytest.skip("ATTN_DISPATCH_TEST_CUDNN names no other cuDNN")
    cudnn = part_of_cudnn(tmp_path / "cudnn", real, missing)
    done = run("""
        try:
            load()
        except native.CudnnError as error:
            print(f"{error.code}: {error}")
        else:
            print(plan(128))
        """, cudnn)  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    message = done.stdout.splitlines()[-1]
    if "graph" in missing:
        folder = cudnn.parent
        assert message.startswith(
            f"library: cuDNN at {cudnn} is incomplete: {folder}/libcudnn_graph.so.9: cannot open"
        )
    else:
        is_planned = message.isdigit() or message.startswith("unsupported: ")
        is_library_failure = message.startswith("library: ") and "SUBLIBRARY" in message
        assert is_planned or is_library_failure, message


def test_a_subinterpreter_cannot_import_the_library():
    """It waited for ever for the interpreter's lock, in CPython 3.11."""
    native = importlib.import_module("attn_dispatch._cuda")
    assert "got a subinterpreter" in import_error("_cuda", Path(str(native.__file__)))


def test_a_partial_download_beside_cudnn_is_ignored(tmp_path: Path):
    """cuDNN never loads the file, since its name is not that of a library."""
    cudnn = part_of_cudnn(tmp_path / "cudnn", CUDNN, ())
    with Path(CUDNN).open("rb") as whole:
        (cudnn.parent / "libcudnn_ops.so.9.part").write_bytes(whole.read(4096))
    done = run("load()\nprint(plan(128))", cudnn)
    assert done.stdout.strip().isdigit(), done.stderr
