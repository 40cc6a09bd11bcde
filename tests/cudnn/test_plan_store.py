"""Plans kept in a folder: the next process reads them, unless anything is wrong with them."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch import environment
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.cudnn import plan_store
from attn_dispatch.devices.target import parse
from tests.support.backend import needs_cudnn
from tests.support.cudnn_calls import cudnn_attributes
from tests.support.present import present
from tests.support.repository import ROOT

pytestmark = needs_cudnn

SM90 = parse("sm90").properties or ""
ATTRIBUTES = cudnn_attributes(batch=1, num_heads=2, num_kv_heads=2, seq_len_q=128, seq_len_kv=128)

OTHER_PROCESS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.cudnn.test_plan_store import SM90, call
from attn_dispatch.cudnn import library, plan_store
backend = library.find().backend
for i in map(int, sys.argv[2:]):
    plan_store.plan(backend, call(i), SM90)
    line = backend.export_plan(call(i), SM90)
    print(len(line), line[-40:], flush=True)
"""


def call(number: int) -> dict[str, Any]:
    return ATTRIBUTES | {"seq_len_kv": 1024 + 8 * number}


class Backend:
    """The real backend without any plans in memory, which counts the plans that it builds."""

    def __init__(self) -> None:
        self._real: Any = cudnn_library.find().backend
        self.CudnnError = self._real.CudnnError
        self.plans: dict[str, str] = {}
        self.built = 0

    def plan_key(self, attributes: Any, properties: str) -> str:
        return self._real.plan_key(attributes, properties)

    def has_plan(self, attributes: Any, properties: str) -> bool:
        return self.plan_key(attributes, properties) in self.plans

    def import_plan(self, attributes: Any, properties: str, line: str) -> None:
        self._real.import_plan(attributes, properties, line)
        self.plans[self.plan_key(attributes, properties)] = line

    def export_plan(self, attributes: Any, properties: str) -> str:
        return self.plans[self.plan_key(attributes, properties)]

    def plan(self, attributes: Any, properties: str) -> tuple[str, int]:
        found = self._real.plan(attributes, properties)
        if not self.has_plan(attributes, properties):
            self.built += 1
            line = self._real.export_plan(attributes, properties)
            self.plans[self.plan_key(attributes, properties)] = line
        return found


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(plan_store.FOLDER, str(tmp_path / "plans"))
    return tmp_path / "plans"


def builds(number: int = 0) -> int:
    """The number of plans that a new process builds in order to plan a call."""
    backend: Any = Backend()
    assert plan_store.plan(backend, call(number), SM90)[0].startswith("eng")
    return backend.built


def only_plan(folder: Path) -> Path:
    (file,) = folder.glob("*.plan")
    return file


def test_next_process_reads_the_plan(folder):
    assert [builds(), builds(), builds(1), builds(1)] == [1, 0, 1, 0]
    assert len(list(folder.iterdir())) == 2
    assert {x.stat().st_mode & 0o777 for x in (folder, *folder.iterdir())} == {0o700, 0o600}


def test_read_plan_equals_the_built_plan(folder):
    """Another process exports the same bytes without planning."""
    command = (sys.executable, "-c", OTHER_PROCESS, "", "0", "1")
    first, second = (subprocess.check_output(command) for _ in range(2))
    assert first == second and first.count(b"\n") == 2


def test_no_plan_is_kept_if_switched_off(folder, monkeypatch):
    monkeypatch.setenv(plan_store.FOLDER, environment.OFF)
    assert [builds(), builds()] == [1, 1] and not folder.exists()


def test_default_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv(plan_store.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert [builds(), builds()] == [1, 0]
    assert len(list((tmp_path / "cache" / "attn-dispatch" / "plans").iterdir())) == 1


def test_folder_can_be_relative_to_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(plan_store.FOLDER, "~/plans")
    assert plan_store.plans_folder() == tmp_path / "plans"
    monkeypatch.setenv(plan_store.FOLDER, "~nobody-of-this-name/plans")
    assert plan_store.plans_folder() == Path("~nobody-of-this-name/plans")


def test_plan_key_ignores_properties_that_depend_on_the_cudnn_version(folder):
    """cuDNN 9.28 reports more properties of the same device than 9.19."""
    properties = json.loads(SM90)
    more = {"memoryBusWidth", "smCountOrigin", "oversizedSharedMemoryPerBlock"}
    assert more < properties.keys()
    backend: Any = cudnn_library.find().backend
    older = json.dumps({x: y for x, y in properties.items() if x not in more} | {"pciDeviceId": 6})
    assert backend.plan_key(call(0), older) == backend.plan_key(call(0), SM90)
    other = json.dumps(properties | {"multiProcessorCount": 66})
    assert backend.plan_key(call(0), other) != backend.plan_key(call(0), SM90)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def with_flipped_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def with_another_calls_plan(file: Path) -> None:
    """A valid plan of another call under this call's name."""
    builds(7)
    (other,) = (x for x in file.parent.glob("*.plan") if x != file)
    os.replace(other, file)


def without_a_plan(file: Path) -> None:
    file.write_bytes(plan_store._checksum(b'{"key": 3}') + b'\n{"key": 3}')


def replaced_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replaced_by_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replaced_by_a_link(file: Path) -> None:
    os.replace(file, file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


def writable_by_others(file: Path) -> None:
    file.chmod(0o622)


@pytest.mark.parametrize(
    "spoil",
    [
        truncated,
        with_flipped_bit,
        with_another_calls_plan,
        without_a_plan,
        replaced_by_a_folder,
        replaced_by_a_pipe,
        replaced_by_a_link,
        writable_by_others,
    ],
)
def test_wrong_file_is_planned_again_and_replaced(folder, spoil, caplog):
    builds()
    spoil(only_plan(folder))
    with caplog.at_level(logging.DEBUG, logger="attn_dispatch"):
        assert builds() == 1
    assert "planned anew" in caplog.text
    # The file is replaced, unless a folder is in its place.
    assert builds() == (spoil is replaced_by_a_folder)


def test_other_users_plans_are_read_only_if_trusted(folder, monkeypatch):
    builds()
    found = only_plan(folder).stat()
    others = os.stat_result((found.st_mode, *found[1:4], 54321, *found[5:10]))
    monkeypatch.setattr(os, "fstat", lambda descriptor: others)
    assert builds() == 1
    monkeypatch.setenv(environment.TRUST_FILES, "0")
    assert builds() == 1
    monkeypatch.setenv(environment.TRUST_FILES, "1")
    assert builds() == 0
    monkeypatch.setenv(environment.TRUST_FILES, "yes")
    with pytest.raises(ValueError, match="ATTN_DISPATCH_TRUST_FILES: expected 0 or 1, got 'yes'"):
        builds()


def test_unwritable_folder_keeps_no_plans(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(plan_store.FOLDER, str(tmp_path / "file" / "plans"))
    with caplog.at_level(logging.DEBUG, logger="attn_dispatch"):
        assert [builds(), builds()] == [1, 1]
    assert "not kept" in caplog.text


def test_full_disk_leaves_no_file(monkeypatch, folder, caplog):
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.DEBUG, logger="attn_dispatch"):
        assert builds() == 1
    assert "No space left" in caplog.text and not list(folder.iterdir())


def test_number_of_plans_is_bounded(folder, monkeypatch):
    """The latest used plans stay; an eighth of the files and all unfinished ones are removed."""
    monkeypatch.setattr(plan_store, "MAX_FILES", 8)
    folder.mkdir()
    now = time.time()
    for age in range(8):
        (folder / f"{age}.plan").write_text("")
        os.utime(folder / f"{age}.plan", (now - 100 + age, now - 100 + age))
    abandoned, fresh = folder / f"begun-{'0' * 16}", folder / f"begun-{'1' * 16}"
    (folder / "begun-notes").write_text("another's")
    for file in (abandoned, fresh):
        file.write_text("")
    for file in (abandoned, folder / "begun-notes"):
        os.utime(file, (now - 7200, now - 7200))
    builds()
    others = {f"{age}.plan" for age in range(2, 8)}
    left = {x.name for x in folder.iterdir()}
    assert others | {fresh.name, "begun-notes"} < left and len(left) == 9
    assert builds() == 0


def test_write_to_a_full_folder_does_not_examine_each_file(folder, monkeypatch):
    """The 4,096 files are listed; their times are read only when some must be removed."""
    folder.mkdir()
    for number in range(plan_store.MAX_FILES - 1):
        (folder / f"{number}.plan").touch()
    examined: list[Any] = []
    monkeypatch.setattr(plan_store, "_last_used", lambda x: (examined.append(x), 0.0)[1])
    written = [folder / f"{'a' * 60}{x}.plan" for x in "bcd"]
    plan_store._write(written[0], "a line")
    assert examined == [] and len(os.listdir(folder)) == plan_store.MAX_FILES
    plan_store._write(written[1], "a line")
    assert len(examined) == plan_store.MAX_FILES
    assert len(os.listdir(folder)) == plan_store.MAX_FILES * 7 // 8 and written[1].exists()
    plan_store._write(written[2], "a line")
    assert len(examined) == plan_store.MAX_FILES, "the next writes examine none"
    assert plan_store._write_failures.keys().isdisjoint(written)


WRITER = """
import sys
from pathlib import Path
from attn_dispatch.cudnn import plan_store
plan_store.MAX_FILES = 16
sys.stdin.readline()
for number in range(200):
    plan_store._write(Path(sys.argv[1]) / f"{sys.argv[2]}-{number}.plan", "x" * 1000)
print(plan_store.write_failures(Path(sys.argv[1])), flush=True)
"""


def test_processes_can_write_at_the_same_time(folder):
    """Each process removes files that the others are reading."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(4)
    ]  # fmt: skip
    outputs = [x.communicate("go\n", timeout=120)[0] for x in processes]
    assert outputs == ["[]\n"] * 4
    assert 0 < len(list(folder.glob("*.plan"))) < 16 + 4
    assert not list(folder.glob("begun-*"))


def test_used_plan_gets_a_new_time(folder):
    builds()
    file = only_plan(folder)
    os.utime(file, (1, 1))
    builds()
    assert time.time() - file.stat().st_mtime < 60


def test_processes_plan_at_once_while_one_is_killed(folder):
    command = (sys.executable, "-c", OTHER_PROCESS, "", "4", "5", "6")
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    assert processes[0].stdout is not None
    processes[0].stdout.readline()
    processes[0].kill()
    outputs = [x.communicate()[0] for x in processes[1:]]
    assert len(set(outputs)) == 1 and outputs[0].count(b"\n") == 3
    assert all(x.returncode == 0 for x in processes[1:])
    processes[0].communicate()
    assert [builds(4), builds(5), builds(6)] == [0, 0, 0]


def test_plan_key_depends_on_cudnn_device_and_attributes():
    backend: Any = cudnn_library.find().backend
    key = backend.plan_key(call(0), SM90)
    version = str(backend.cudnn_version())
    assert f"cudnn={version} frontend=" in key and " made by " in key and '"deviceVer":900' in key
    assert backend.plan_key(call(0) | {"scale": 0.3}, SM90) != key
    assert backend.plan_key(call(0), parse("sm100").properties or "") != key


def test_plan_that_was_built_again_replaces_its_file(folder):
    """An imported plan that did not load on a device is built again and written to its file."""
    backend: Any = cudnn_library.find().backend
    plan_store.plan(Backend(), call(1), SM90)  # type: ignore[arg-type]
    (file,) = folder.glob("*.plan")
    line = present(plan_store._read(file))
    file.write_text("what did not load")

    class Remade:
        CudnnError = backend.CudnnError

        def take_remade_plans(self) -> dict[str, str]:
            return {backend.plan_key(call(1), SM90): line}

    plan_store.replace_remade(Remade())  # type: ignore[arg-type]
    assert plan_store._read(file) == line and list(folder.iterdir()) == [file]


FULL_DISK = f"""
import os, resource, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.cudnn.test_plan_store import SM90, call
from attn_dispatch.cudnn import library, plan_store
backend = library.find().backend
plan_store.plan(backend, call(1), SM90)
room = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, room[1]))
folder = plan_store.plans_folder()
print(plan_store.plan(backend, call(2), SM90)[1], plan_store.write_failures(folder))
resource.setrlimit(resource.RLIMIT_FSIZE, room)
print(plan_store.plan(backend, call(3), SM90)[1], os.listdir(sys.argv[1]))
"""


def test_disk_that_fills_up_while_a_plan_is_written(folder):
    """Files are limited to 1,000 bytes: half a plan is removed again, and planning succeeds."""
    command = (sys.executable, "-c", FULL_DISK, folder)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    full, then_enough = done.stdout.splitlines()
    assert full.endswith("['File too large']")
    assert then_enough.count(".plan") == 2 and "begun-" not in then_enough
