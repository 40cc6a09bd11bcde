"""The `attn-dispatch` command: info, help, and errors that all commands share."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import attn_dispatch
from attn_dispatch.aiter.folder import AiterBuild
from attn_dispatch.core import select
from attn_dispatch.cudnn import library as cudnn_library
from attn_dispatch.cudnn.library import CudnnLibrary
from attn_dispatch.devices.target import parse
from attn_dispatch_tools import cli
from attn_dispatch_tools.commands import info as info_command
from tests.support.backend import WITHOUT_PLANNER, needs_cudnn
from tests.support.repository import ROOT


@pytest.fixture
def info(capsys):
    def run() -> list[str]:
        cli.main(["info"])
        return capsys.readouterr().out.splitlines()

    return run


def test_info_lists_versions_devices_and_implementations(info):
    lines = info()
    assert lines[0] == (
        f"attn_dispatch {attn_dispatch.__version__}, jax {jax.__version__}, "
        f"jaxlib {importlib.metadata.version('jaxlib')}"
    )
    device = jax.devices()[0]
    assert f"  0: {device.device_kind} (cpu)" in lines[lines.index("devices") :]
    states = lines[lines.index("implementations on CPU (cpu)") :]
    assert "  cudnn  no: cuDNN runs on NVIDIA GPUs, and this is CPU (cpu)" in states
    assert "  aiter  no: AITER runs on AMD GPUs, and this is CPU (cpu)" in states
    assert "  xla    usable" in states


def test_info_suggests_a_command_that_runs(info, capsys):
    lines = info()
    step = lines[lines.index("next") + 1 :]
    assert step[0] == "  XLA computes everything here. What a GPU would run:"
    (line,) = step[1:]
    words = shlex.split(line)
    assert words[:2] == ["attn-dispatch", "explain"]
    cli.main(words[1:])
    assert "device    cuda: NVIDIA H100 (sm90, " in capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 80, 100])
def test_info_without_the_planner_gives_the_command_that_installs_it(
    info, monkeypatch, columns: int
):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(cudnn_library, "find", lambda: WITHOUT_PLANNER)
    lines = info()
    *what, command = lines[lines.index("next") + 1 :]
    assert "H100 or another NVIDIA GPU would run cannot be known" in " ".join(
        line.strip() for line in what
    )
    assert WITHOUT_PLANNER.missing and command == f"    {WITHOUT_PLANNER.missing.install}"
    assert not any("explain" in line for line in lines)


@pytest.mark.parametrize(
    ("arch", "usable", "commands"),
    [
        ("sm90", (), ["ATTN_DISPATCH_CUDA=1 pip install '.[cuda13]'"]),
        ("sm90", ("cudnn",), ["attn-dispatch explain", "attn-dispatch verify"]),
        ("gfx942", (), ["ATTN_DISPATCH_ROCM=1 pip install '.[rocm]'",
                        "attn-dispatch build-aiter --arch gfx942"]),
        ("gfx950", ("aiter",), ["attn-dispatch explain", "attn-dispatch verify"]),
    ],
)  # fmt: skip
def test_info_suggests_the_next_steps_for_a_gpu(
    info, monkeypatch, arch: str, usable, commands: list[str]
):
    device = parse(arch)
    monkeypatch.setattr(info_command, "device_for", lambda platform: device)
    monkeypatch.setattr(info_command, "platform_of", lambda device: "gpu")
    for x in select.implementations():
        reason = None if x.NAME in usable else "not built"
        monkeypatch.setattr(x, "unusable_reason", lambda device, reason=reason: reason)
    lines = info()
    found = [line[4:] for line in lines[lines.index("next") :] if line.startswith("    ")]
    found = [line for line in found if not line.startswith(" ")]
    assert len(found) == len(commands)
    assert all(x.startswith(y) for x, y in zip(found, commands, strict=True)), found


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_info_fits_the_terminal(info, monkeypatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    long = [x for x in info() if len(x) > columns]
    assert all("/" in x or x.startswith("    attn-dispatch") for x in long), long


@needs_cudnn
def test_info_shows_the_version_and_path_of_cudnn(info):
    library = cudnn_library.find()
    lines = info()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("  cuDNN"))
    assert re.match(r"  cuDNN 9\.\d+\.\d+, ", lines[at]) and library.version_text in lines[at]
    assert f"      [{library.path}]" in lines[at + 1 : at + 3] and Path(library.path).exists()


def test_info_shows_why_cudnn_is_unusable(info, monkeypatch):
    lost = CudnnLibrary(
        None, path="/lost/libcudnn.so.9", unusable_reason="cuDNN could not be loaded"
    )
    monkeypatch.setattr(cudnn_library, "find", lambda: lost)
    assert "  cuDNN: cuDNN could not be loaded\n      [/lost/libcudnn.so.9]" in "\n".join(info())


def test_info_lists_builds_of_aiter(info, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_DISPATCH_AITER", str(tmp_path))
    assert f"  AITER: not built here\n      [{tmp_path}]" in "\n".join(info())
    (tmp_path / "gfx942").mkdir()
    build = AiterBuild("dev18", "gfx942", "0.1.7", "", "", "", "hipcc 7", False, 3, 5, "2026-11-21")
    build.write(tmp_path / "gfx942")
    assert f"  AITER 0.1.7 for gfx942\n      [{tmp_path / 'gfx942'}]" in "\n".join(info())


def test_version_prints_the_version_alone(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == attn_dispatch.__version__


@pytest.mark.parametrize("arguments", [[], ["inform"]])
def test_a_wrong_command_prints_the_usage(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: attn-dispatch" in capsys.readouterr().err


def test_the_project_installs_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, name = project["project"]["scripts"]["attn-dispatch"].split(":")
    assert (module, getattr(cli, name)) == (cli.__name__, cli.main)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["infp"], []])
def test_help_does_not_import_jax_or_numpy(words: list[str]):
    """Importing JAX takes most of a second."""
    code = "import sys; sys.modules['jax'] = sys.modules['numpy'] = None; "
    code += f"from attn_dispatch_tools import cli; cli.main({words})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if words and words[0].startswith("--") else 2)
    assert words not in (["--help"], ["infp"]) or "info" in done.stdout + done.stderr


def test_help_lists_every_command(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli.parser(only="").format_help()
    assert all(re.search(rf"^    {name} +\S", shown, re.M) for name in cli.names()), shown


def test_the_list_of_commands_does_not_depend_on_imports():
    assert cli.parser(only="").format_help() == cli.parser().format_help()


def test_python_m_runs_the_command():
    command = [sys.executable, "-m", "attn_dispatch"]
    done = subprocess.run([*command, "info"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"attn_dispatch {attn_dispatch.__version__}, jax ")
    assert "implementations on CPU (cpu)\n" in done.stdout
    none = subprocess.run(command, capture_output=True, text=True, check=False)
    assert none.returncode == 2 and none.stderr.startswith("usage: attn-dispatch")
    runpy.run_module("attn_dispatch.__main__")  # under another name the module does nothing


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", ["", *cli.names()])
def test_help_fits_the_terminal_and_has_examples(monkeypatch, capsys, command: str, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        cli.main([*([command] if command else []), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert not [x for x in lines if len(x) > columns]
    if command:
        assert "examples:" in lines, "each command has examples"


@pytest.mark.parametrize("command", cli.names())
def test_examples_in_help_can_be_parsed(monkeypatch, capsys, command: str):
    """The examples are parsed with the options that exist, and not run."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out.partition("\nexamples:\n")[2].replace("\\\n", " ")
    for line in shown.splitlines():
        line = line.partition(" > ")[0]
        words = [x for x in shlex.split(line, comments=True) if "=" not in x or "[" in x]
        assert words[0] == "attn-dispatch" and words[1] == command
        cli.parser().parse_args(words[1:])


def test_no_text_installs_the_project_from_an_index():
    """The project is on no index: its extras are installed from a checkout."""
    packages = Path(attn_dispatch.__file__).parents[1]
    root = packages.parent
    files = [*packages.rglob("*.py"), root / "README.md", *(root / "docs").rglob("*.md")]
    assert len(files) > 50
    for file in files:
        found = re.findall(r"install\s+['\"`]*attn[-_]dispatch.*", file.read_text())
        assert not found, f"{file}: {found}"


def test_a_closed_pipe_ends_explain_without_a_traceback():
    """The status of `explain … | head` is 141, not the status 1 of explain."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "attn_dispatch", "explain", "q=f32[1,8,1,4]"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 141
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("words", "usage", "message"),
    [
        (["info", "--foo"], "info", "unrecognized arguments: --foo\n"),
        (
            ["explain", "q=f32[1,8,1,4]", "--causual"],
            "explain",
            "--causual; did you mean '--causal'?",
        ),
        (["--foo", "mask", "--seq", "8"], "mask", "unrecognized arguments: --foo"),
        (["bench", "--otu", "x"], "bench", "--otu x; did you mean '--out'?"),
        (["mask", "--seq", "8", "--widow", "-1,2"], "mask", "did you mean '--window'?"),
        (
            ["explain", "q=f32[1,8,1,4]", "--implementation", "cudnn,xla"],
            "explain",
            "--implementation: expected one name, got 'cudnn,xla'; repeat the option",
        ),
        (["verify", "--random", "x"], "verify", "--random: expected a whole number, got 'x'"),
        (["verify", "--jobs", "0"], "verify", "--jobs: expected at least 1, got 0"),
        (["bench", "--rounds", "1.5"], "bench", "--rounds: expected a whole number, got '1.5'"),
        (["bench", "--seconds", "x"], "bench", "--seconds: expected a number, got 'x'"),
    ],
)
def test_wrong_options_are_reported_with_the_usage_of_the_command(
    words, usage: str, message: str, capsys
):
    with pytest.raises(SystemExit) as status:
        cli.main(words)
    assert status.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: attn-dispatch {usage} [-h]") and message in error


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "nowhere.json"],
        ["plan", "nowhere.json", "--target", "h200"],
        ["tune", "nowhere.json"],
        ["verify", "--plot", "nowhere.json"],
        ["verify", "--repeat", "nowhere.json"],
        ["bench", "--plot", "nowhere.json"],
        ["mask", "--seq", "4", "--out", "/nowhere/at/all.svg"],
    ],
)
def test_a_missing_file_is_an_error_in_words(words: list[str]):
    """The error has no names or numbers of Python's errors."""
    with pytest.raises(SystemExit) as status:
        cli.main(words)
    message = str(status.value.code)
    assert message.startswith("error: ") and "nowhere" in message
    assert (
        re.search("no such file", message, re.I)
        and "Errno" not in message
        and "Error" not in message
    )


def test_a_misspelt_command_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit) as status:
        cli.main(["explan"])
    assert status.value.code == 2
    assert "got 'explan'; did you mean 'explain'?" in capsys.readouterr().err
