"""The steps of `attn-dispatch build-fa4`: sets, the compiler's environment, keeping, linking."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from attn_dispatch.devices import code_files
from attn_dispatch_tools.build_fa4 import compiling, environment, linking, processes, score_mods
from attn_dispatch_tools.build_fa4.compiling import Compiled
from attn_dispatch_tools.build_fa4.hosts import HOSTS
from attn_dispatch_tools.build_fa4.sets import SETS
from attn_dispatch_tools.terminal.building import BuildError
from tests.support import fa4_stand_in

D64, MLA = SETS["sm90_d64_bfloat16"], SETS["sm90_d192_128_float16"]
WIDE = SETS["sm90_d512_float16"]
NARROW = [x for x in SETS.values() if not x.is_wide]


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# Sets.


def test_there_is_a_set_for_each_architecture_pair_of_head_dims_and_dtype():
    dims = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
    wide = [(384, 384), (512, 512)]
    cells = [*(("sm90", *x) for x in (*dims, *wide)), *(("sm100", *x) for x in dims[:3])]
    expected = [(*x, y) for x in cells for y in ("bfloat16", "float16")]
    assert [(x.arch, x.head_dim, x.head_dim_v, x.dtype) for x in SETS.values()] == expected
    assert [x.name for x in SETS.values()] == list(SETS)
    assert MLA.name == "sm90_d192_128_float16"


@pytest.mark.parametrize("kernels", NARROW, ids=lambda x: x.name)
def test_only_equal_head_dims_have_gradients_of_grouped_heads(kernels):
    grouped = {"backward_grouped", "key_value_grad"}
    expected = grouped if kernels.head_dim == kernels.head_dim_v else set()
    assert grouped & {*kernels.kernels} == expected
    assert {"forward", "preprocess", "backward", "query_grad"} <= {*kernels.kernels}


def test_wide_sets_have_kernels_of_their_own():
    assert [x.head_dim for x in SETS.values() if x.is_wide] == [384, 384, 512, 512]
    assert all(x.startswith("wide_") for x in WIDE.kernels)
    assert not any(y.startswith("wide_") for x in NARROW for y in x.kernels)
    assert {f"{x}_causal" for x in WIDE.kernels[::2]} == {*WIDE.kernels[1::2]}


def test_kernels_for_sm90_take_sinks():
    for kernels in NARROW:
        forward = {x for x in kernels.kernels if x.startswith("forward")}
        sinks = {"forward_sinks", "forward_bits_sinks"} if kernels.arch == "sm90" else set()
        assert forward == {"forward", "forward_bits"} | sinks


@pytest.mark.parametrize("kernels", NARROW, ids=lambda x: x.name)
def test_an_entry_of_the_backward_lists_is_128_query_rows(kernels):
    backward = kernels.backward
    assert backward.tile_m * backward.subtiles == 128
    assert kernels.as_json()["backward"]["subtiles"] == backward.subtiles


# The environment.


def test_the_environment_is_made_once_and_completed_if_it_was_cut_off(tmp_path):
    python, cache = fa4_stand_in.python(tmp_path), tmp_path / "cache"
    inside = environment.made(cache, str(python.path))
    assert len(python.taken()) == 3
    assert environment.made(cache, str(python.path)) == inside
    assert python.taken() == []
    (inside.parents[1] / "complete").unlink()
    assert environment.made(cache, str(python.path)) == inside
    assert len(python.taken()) == 3


def test_other_versions_have_another_environment(tmp_path, monkeypatch):
    python = fa4_stand_in.python(tmp_path)
    before = environment.made(tmp_path, str(python.path))
    monkeypatch.setattr(environment, "COMPILER", "nvidia-cutlass-dsl==4.8.2")
    assert environment.made(tmp_path, str(python.path)) != before


def test_all_packages_have_one_exact_version():
    """Exporters replace lines of the sources, and fa4_library.c calls what the compiler wrote."""
    for package in (environment.SOURCES, *environment.WIDE_SOURCES, environment.COMPILER):
        assert re.fullmatch(r"[a-z0-9-]+==[\d.]+", package), package


def test_a_suitable_python_is_found_on_path(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_NEWEST", (3, 10))  # as if this Python were too new
    _script(tmp_path / "python3.12", "exit 1")
    suitable = _script(tmp_path / "python3.13", "exit 0")
    _script(tmp_path / "python3.14", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment._suitable_python() == str(suitable)


def test_without_a_suitable_python_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_OLDEST", (3, 97))
    monkeypatch.setattr(environment, "_NEWEST", (3, 99))
    _script(tmp_path / "python3", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    sentence = r"needs Python 3.97 to 3.99, this is 3\.\d+.*none on PATH; name one with --python"
    with pytest.raises(BuildError, match=sentence):
        environment._suitable_python()


# What is kept.


def test_the_folder_of_a_set_depends_on_whatever_decides_its_objects(tmp_path, monkeypatch):
    folders = [compiling.kept(tmp_path, D64).folder, compiling.kept(tmp_path, MLA).folder]
    forward = dataclasses.replace(D64.forward, tile_m=128)
    folders.append(compiling.kept(tmp_path, dataclasses.replace(D64, forward=forward)).folder)
    folders += [
        compiling.kept(tmp_path, D64, x).folder for x in HOSTS.values() if not x.is_this_machine
    ]
    variant = score_mods.variant("attn_dispatch.mods:soft_cap(2)")
    folders.append(compiling.kept(tmp_path, dataclasses.replace(D64, variant=variant)).folder)
    for i, script in enumerate(compiling.SCRIPTS):
        (other := tmp_path / script.name).write_text(script.read_text() + "# changed")
        scripts = (*compiling.SCRIPTS[:i], other, *compiling.SCRIPTS[i + 1 :])
        with monkeypatch.context() as changed:
            changed.setattr(compiling, "SCRIPTS", scripts)
            folders.append(compiling.kept(tmp_path, D64).folder)
    monkeypatch.setattr(environment, "SOURCES", "fa4-jax==0.1.1")
    folders.append(compiling.kept(tmp_path, D64).folder)
    wide = [compiling.kept(tmp_path, WIDE).folder]
    for i, script in enumerate(compiling.WIDE_SCRIPTS):
        (other := tmp_path / script.name).write_text(script.read_text() + "# changed")
        scripts = (*compiling.WIDE_SCRIPTS[:i], other, *compiling.WIDE_SCRIPTS[i + 1 :])
        with monkeypatch.context() as changed:
            changed.setattr(compiling, "WIDE_SCRIPTS", scripts)
            wide.append(compiling.kept(tmp_path, WIDE).folder)
    monkeypatch.setattr(environment, "WIDE_SOURCES", ("ffpa-attn==0.2.5",))
    folders += [*wide, compiling.kept(tmp_path, WIDE).folder]
    assert len({*folders}) == len(folders)
    monkeypatch.undo()
    assert compiling.kept(tmp_path, D64).folder == folders[0]


def test_the_folder_of_a_set_does_not_depend_on_what_a_mod_is_called(tmp_path):
    variant = score_mods.variant("attn_dispatch.mods:soft_cap(2)")
    folders = [
        compiling.kept(tmp_path, dataclasses.replace(D64, variant=x)).folder
        for x in (variant, dataclasses.replace(variant, name="another"))
    ]
    assert folders[0] == folders[1]


def test_a_set_is_complete_with_all_objects_and_symbols(tmp_path):
    compiled = Compiled(D64, tmp_path)
    fa4_stand_in.compile_set(tmp_path, D64.as_json())
    assert compiled.is_complete
    for name in ("symbols.json", "key_value_grad.o"):
        (tmp_path / name).rename(tmp_path / "away")
        assert not compiled.is_complete
        (tmp_path / "away").rename(tmp_path / name)


# Linking.


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> list[Compiled]:
    """Compiled stand-ins of a set with and one without gradients of grouped heads."""
    compiled = []
    for kernels in (D64, MLA):
        folder = tmp_path_factory.mktemp(kernels.name)
        fa4_stand_in.compile_set(folder, kernels.as_json())
        compiled.append(Compiled(kernels, folder))
    return compiled


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Compiled:
    """Compiled stand-ins of a set for wide heads."""
    folder = tmp_path_factory.mktemp(WIDE.name)
    fa4_stand_in.compile_set(folder, WIDE.as_json())
    return Compiled(WIDE, folder)


def test_a_library_names_the_packages_of_its_sets(both, wide):
    tables = (linking.table(x) for x in (both, [wide]))
    versions = [re.findall(r'VERSIONS "(.*)"', x)[0] for x in tables]
    assert versions == [
        "fa4-jax==0.1.0 nvidia-cutlass-dsl==4.8.1",
        "ffpa-attn==0.2.4 quack-kernels==0.6.4 nvidia-cutlass-dsl==4.8.1",
    ]


def test_the_table_has_the_kernels_in_the_order_of_the_header(both, wide):
    header = (linking.SOURCE.with_suffix(".h")).read_text()
    fields = re.findall(r"^  AttnFa4Kernel (\w+);$", header, re.M)
    assert (*fields,) == linking._KERNELS
    versions, d64, mla, d512 = linking.table([*both, wide]).splitlines()
    assert versions == f'#define VERSIONS "{environment.versions(has_wide=True)}"'
    assert d64.startswith('SET("sm90_d64_bfloat16", "sm90", "bfloat16", 64, 64, TILES(192, 128, ')
    of_wide = [x for x in fields if x.startswith("wide_")]
    assert re.findall(r"KERNEL\(sm90_d64_bfloat16_(\w+), ", d64) == fields[: -len(of_wide)]
    assert re.findall(r" KERNEL\(sm90_d512_float16_(\w+), ", d512) == of_wide
    grouped = ("backward_grouped", "backward_bits_grouped", "key_value_grad")
    assert f" {' '.join(f'NO_KERNEL({x})' for x in grouped)} KERNEL(" in mla


def test_the_library_exports_one_function_and_needs_nothing_of_cuda(both, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", str(fa4_stand_in.linker(tmp_path)))
    library = tmp_path / "a folder, 2" / "library.so"
    library.parent.mkdir()
    before = os.umask(0o002)  # as some systems have it for users
    linking.link(both, library)
    os.umask(before)
    assert exported(library) == ["attn_dispatch_fa4_library"]
    assert code_files.library_problem(library, is_named=True) == ""
    assert not re.search(r"cuda|cutlass|stdc\+\+", _output("readelf", "-dW", str(library)))


def exported(library: Path) -> list[str]:
    return _output("nm", "-D", "--defined-only", "--format=just-symbols", str(library)).split()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_an_object_that_needs_more_of_the_driver_does_not_link(both, tmp_path):
    """The library must not look for what fa4_library.c does not give it as a kernel runs."""
    folder = tmp_path / "set"
    folder.mkdir()
    fa4_stand_in.compile_set(folder, MLA.as_json())
    source = "int _cudaGraphLaunch(void); int use(void) { return _cudaGraphLaunch(); }"
    command = ["cc", "-fPIC", "-x", "c", "-c", "-", "-o", str(folder / "query_grad.o")]
    subprocess.run(command, input=source, text=True, check=True)
    with pytest.raises(BuildError, match=r"(?s)linking library.so failed;.*_cudaGraphLaunch"):
        linking.link([Compiled(MLA, folder)], tmp_path / "library.so")
    assert not (tmp_path / "library.so").exists()
    assert [x.name for x in tmp_path.iterdir()] == ["set"]


def test_without_a_compiler_the_error_says_what_to_install(both, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match=r"no C compiler for .*; install gcc or set CC"):
        linking.link(both, tmp_path / "library.so")


def test_symbols_of_another_kernel_do_not_link(both, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", str(fa4_stand_in.linker(tmp_path)))
    folder = tmp_path / "set"
    folder.mkdir()
    for x in both[1].objects:
        os.link(x, folder / x.name)
    symbols = both[1].symbols | {"forward": "_mlir_something_else"}
    (folder / "symbols.json").write_text(json.dumps(symbols))
    with pytest.raises(BuildError, match="_mlir_something_else"):
        linking.link([Compiled(MLA, folder)], tmp_path / "library.so")


# Programs.


def test_a_program_that_takes_too_long_is_ended():
    with pytest.raises(BuildError, match=r"^waiting took longer than 0 s$"):
        processes.run(["sleep", "60"], what="waiting", seconds=0.1)


def test_only_the_last_lines_of_a_failure_are_shown():
    with pytest.raises(BuildError) as stop:
        processes.run(["sh", "-c", "seq 100; exit 3"], what="counting", seconds=10)
    lines = str(stop.value).splitlines()
    assert lines == ["counting failed; its last lines are:", *map(str, range(71, 101))]


def test_output_that_is_not_text_is_replaced():
    assert processes.run(["printf", r"\377x"], what="printing", seconds=10) == "\ufffdx"
