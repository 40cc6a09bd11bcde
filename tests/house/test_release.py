"""The release: its facts agree with pyproject.toml, and its checks notice errors."""

from __future__ import annotations

import io
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import checks
import install_lines
import native
import tables
from plugins import OLDEST_JAX, PLATFORM, PLUGINS, PYTHONS, VERSION
from tests.support.headers import find_headers
from tests.support.repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILDS = PROJECT["tool"]["scikit-build"]["overrides"]


def test_versions_and_extras_agree_with_the_project():
    assert f"jax>={OLDEST_JAX}" in PROJECT["project"]["dependencies"]
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    assert (ROOT / "cuda_backend" / "library.cc").read_text().count("91200") == 1
    extras = PROJECT["project"]["optional-dependencies"]
    for plugin in PLUGINS:
        assert set(extras[plugin.suffix]) <= set(plugin.requires)
        assert not plugin.suffix.startswith("cuda") or ">=9.12" in plugin.requires[1]


def test_every_build_requires_the_same_headers():
    cuda = next(x["build"]["requires"] for x in BUILDS if "ATTN_DISPATCH_CUDA" in x["if"]["env"])
    headers = {header.requirement for header in find_headers().WANTED}
    assert set(native._HEADER_PACKAGES) == (headers | set(cuda)) - {"pip"}


def wheel(folder: Path, name: str, *, files: dict[str, str], requires: str = "") -> Path:
    path = folder / name
    distribution = "-".join(name.split("-")[:2])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        metadata = f"Metadata-Version: 2.4\nName: x\nVersion: {VERSION}\n{requires}\n"
        archive.writestr(f"{distribution}.dist-info/METADATA", metadata)
        archive.writestr(f"{distribution}.dist-info/licenses/LICENSE", "")
    return path


@pytest.fixture(autouse=True)
def no_tools(monkeypatch):
    """Replace twine and auditwheel, which are not installed with the tests."""
    monkeypatch.setattr(checks, "_twine", lambda path: [])
    monkeypatch.setattr(checks, "_auditwheel", lambda path: [])


PURE = dict.fromkeys(
    ("attn_dispatch/__init__.py", "attn_dispatch/py.typed", "attn_dispatch_tools/__init__.py"), ""
)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        ({"attn_dispatch/tests/test_x.py": ""}, ["stray file attn_dispatch/tests/test_x.py"]),
        ({"attn_dispatch/x.pyc": ""}, ["stray file attn_dispatch/x.pyc"]),
        ({"attn_dispatch/_cuda.cpython-311-x86_64-linux-gnu.so": ""},
         ["compiled: attn_dispatch/_cuda.cpython-311-x86_64-linux-gnu.so"]),
        ({"benchmarks/speed.py": ""}, ["outside the packages: benchmarks/speed.py"]),
    ],
)  # fmt: skip
def test_a_pure_wheel_with_other_files_is_wrong(tmp_path, files, expected):
    name = f"attn_dispatch-{VERSION}-py3-none-any.whl"
    assert checks.faults(wheel(tmp_path, name, files=PURE | files)) == expected


@pytest.mark.parametrize("file", PURE)
def test_a_pure_wheel_without_a_file_is_wrong(tmp_path, file):
    name = f"attn_dispatch-{VERSION}-py3-none-any.whl"
    files = {x: y for x, y in PURE.items() if x != file}
    assert checks.faults(wheel(tmp_path, name, files=files)) == [f"{file} is missing"]


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda x: x.suffix)
def test_a_wheel_of_a_library_needs_its_requirement_and_files(tmp_path, plugin):
    name = f"{plugin.package}-{VERSION}-cp312-cp312-{PLATFORM}.whl"
    library = f"{plugin.package}/{plugin.library}.cpython-312-x86_64-linux-gnu.so"
    right = {f"{plugin.package}/__init__.py": "", library: ""}
    ours = f"Requires-Dist: attn-dispatch=={VERSION}"
    assert checks.faults(wheel(tmp_path, name, files=right, requires=ours)) == []
    (unpinned,) = checks.faults(wheel(tmp_path, name, files=right))
    assert unpinned == f"it does not require attn-dispatch=={VERSION}"
    other = {x.replace("312", "311"): y for x, y in right.items()}
    (wrong,) = checks.faults(wheel(tmp_path, name, files=other, requires=ours))
    assert wrong.startswith(f"expected the library {library}, got ")
    extra = right | {"attn_dispatch/__init__.py": ""}
    (wrong,) = checks.faults(wheel(tmp_path, name, files=extra, requires=ours))
    assert wrong == "unexpected file attn_dispatch/__init__.py"


def test_a_source_distribution_with_missing_or_stray_files_is_wrong(tmp_path):
    path = tmp_path / f"attn_dispatch-{VERSION}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("pyproject.toml", "dispatch/attn_dispatch/_cuda.so", "tests/test_x.py"):
            archive.addfile(tarfile.TarInfo(f"attn_dispatch-{VERSION}/{name}"), io.BytesIO())
    wrong = checks.faults(path)
    assert "LICENSE is missing" in wrong and "pyproject.toml is missing" not in wrong
    assert "stray file tests/test_x.py" in wrong
    assert "stray file dispatch/attn_dispatch/_cuda.so" in wrong


def test_the_install_page_names_the_plugins_that_are_built():
    text = (ROOT / "docs" / "install.md").read_text()
    named = set(re.findall(r"attn-dispatch-(\w+)", text))
    assert named == {x.suffix for x in PLUGINS}


def test_each_install_line_of_the_docs_is_known_and_none_has_failed():
    """A line that has not run yet is marked in the table."""
    kept = install_lines.read(install_lines.KEPT)
    for line in install_lines.lines():
        assert line in install_lines.EXPECTED, f"install_lines.py does not say how to try: {line}"
        assert line not in kept or kept[line]["state"] == "ok", line


def test_install_lines_are_found_in_code_and_in_indented_blocks(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text("`pip install .`, `pip install …`\n\n    A=1 pip install x  # pip install y\n")
    monkeypatch.setattr(install_lines, "REPOSITORY", tmp_path)
    monkeypatch.setattr(install_lines, "pages", lambda: [page])
    assert list(install_lines.lines()) == ["pip install .", "pip install x", "pip install y"]


@pytest.mark.parametrize("path", tables.tables(), ids=lambda x: x.parent.name)
def test_the_tables_are_up_to_date_with_the_results(path):
    text = path.read_text("utf-8")
    assert tables.page(text, tables.tables()[path]) == text, "run python release/tables.py"


def test_a_line_that_failed_has_no_time():
    row = {"state": "WRONG", "seconds": 3.0, "size": 2_500_000_000}
    assert tables._cell([row]) == "WRONG"
    assert tables._cell([row | {"state": "ok"}]) == "3 s, 2.50 GB"
    assert tables._cell([]) == "not run"
