"""Where the compiled kernels of FlashAttention-4 are looked for."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import platformdirs
import pytest

from attn_dispatch.fa4 import folder


@pytest.fixture(autouse=True)
def _without_the_variable(monkeypatch):
    monkeypatch.delenv(folder.VARIABLE, raising=False)


def test_the_environment_names_the_file(monkeypatch, tmp_path):
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "kernels.so"))
    assert folder.library() == tmp_path / "kernels.so"


def test_an_empty_variable_is_as_none(monkeypatch):
    default = folder.library()
    monkeypatch.setenv(folder.VARIABLE, "")
    assert folder.library() == default


def test_a_tilde_is_the_users_folder(monkeypatch):
    monkeypatch.setenv(folder.VARIABLE, "~/kernels.so")
    assert folder.library() == Path.home() / "kernels.so"
    monkeypatch.setenv(folder.VARIABLE, "~nobody-of-this-name/kernels.so")
    assert folder.library() == Path("~nobody-of-this-name/kernels.so")


def test_build_fa4_puts_it_where_the_environment_says_or_in_the_users_folder(monkeypatch, tmp_path):
    data = platformdirs.user_data_path("attn-dispatch")
    assert folder.target() == data / "fa4" / folder.LIBRARY
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "kernels.so"))
    assert folder.target() == tmp_path / "kernels.so"


def test_what_the_user_built_goes_before_what_the_wheel_brought(monkeypatch, tmp_path):
    users, package = tmp_path / "data" / "fa4", tmp_path / "package"
    for place in (users, package):
        place.mkdir(parents=True)
    cuda = ModuleSpec("attn_dispatch._cuda", None, origin=str(package / "_cuda.so"))
    monkeypatch.setattr(folder, "find_spec", lambda name: cuda)
    monkeypatch.setattr(platformdirs, "user_data_path", lambda name: users.parent)
    assert folder.library() == users / folder.LIBRARY  # which a message names
    (package / folder.LIBRARY).touch()
    assert folder.library() == package / folder.LIBRARY
    assert folder.target() == users / folder.LIBRARY
    (users / folder.LIBRARY).touch()
    assert folder.library() == users / folder.LIBRARY
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "none.so"))
    assert folder.library() == tmp_path / "none.so"


def test_without_the_cuda_library_no_wheel_brought_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(folder, "find_spec", lambda name: None)
    monkeypatch.setattr(platformdirs, "user_data_path", lambda name: tmp_path)
    assert folder.library() == tmp_path / "fa4" / folder.LIBRARY


def test_the_defaults_are_folders_of_the_user():
    data = platformdirs.user_data_path("attn-dispatch")
    assert folder.library() == data / "fa4" / "libattn_dispatch_fa4.so"
    assert folder.cache() == platformdirs.user_cache_path("attn-dispatch") / "fa4"


def test_without_a_home_folder_they_are_in_pythons_environment(monkeypatch):
    def fail(name: str):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(platformdirs, "user_data_path", fail)
    monkeypatch.setattr(platformdirs, "user_cache_path", fail)
    share = Path(sys.prefix, "share", "attn-dispatch")
    assert folder.library() == share / "fa4" / folder.LIBRARY
    assert folder.cache() == share / "cache" / "fa4"
