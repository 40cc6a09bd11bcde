"""What the house keeps to beyond its lint; pyproject.toml has the rules about imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import attn_dispatch
import attn_dispatch_tools
from tests.support.repository import ROOT, TESTS

LIBRARY = Path(attn_dispatch.__file__).parent
TOOLS = Path(attn_dispatch_tools.__file__).parent
HOUSE = LIBRARY.parent

PACKAGES = (LIBRARY, TOOLS)
FILES = {package: sorted(package.rglob("*.py")) for package in PACKAGES}


def test_the_library_does_not_name_the_tools():
    """The library must not name them for importlib or `-m` either."""
    named = [x for x in FILES[LIBRARY] if TOOLS.name in x.read_text()]
    assert named == [LIBRARY / "__main__.py"]


def test_the_library_can_be_imported_without_the_tools():
    """All modules that need no framework are imported where the tools cannot be imported."""
    names = (x.relative_to(HOUSE).with_suffix("").parts for x in FILES[LIBRARY])
    modules = [".".join(x) for x in names if "integrations" not in x and x[-1] != "__main__"]
    code = f"import sys\nsys.modules[{TOOLS.name!r}] = None\nimport {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_one_file_imports_private_names_of_jax():
    for path in (*FILES[LIBRARY], *FILES[TOOLS]):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            private = ("jax._src", "jax.interpreters", "jax.experimental")
            if any(name.startswith(private) for name in names):
                assert path.name == "jax_compat.py", f"{path.relative_to(HOUSE)}: {names}"


# Folders of tests/ for no single module: for the C++ backends, the repository, or several modules.
_OTHER_FOLDERS = {
    "cdna", "cuda_backend", "docs", "fuzz", "gpu", "house", "rocm_backend", "scripts",
}  # fmt: skip


def test_folders_of_tests_mirror_the_packages():
    """Tests of a package are in a folder of its name; those of other modules are in tests/."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    for folder in folders - {Path(x) for x in _OTHER_FOLDERS}:
        first, *rest = folder.parts or ("",)
        module = TOOLS.joinpath(*rest) if first == "tools" else LIBRARY / folder
        assert module.is_dir(), (
            f"tests/{folder} has tests, and there is no {module.relative_to(HOUSE)}"
        )


def test_no_file_imports_a_test():
    """Shared code is in tests/support. Scripts may import a test to run it."""
    for path in sorted({*TESTS.rglob("*.py"), *(ROOT / "examples").rglob("*.py")}):
        if path.parent == TESTS / "scripts" and not path.name.startswith("test_"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            words = {word for name in names for word in name.split(".")}
            found = {x for x in words if x.startswith("test_") and x not in _NOT_TESTS}
            assert not found, f"{path.relative_to(ROOT)} imports {found}"


_NOT_TESTS = {"test_util"}  # a module of JAX


_UNKNOWN_NAMES = {
    "typed_jax.py": "the parameters of a JAX primitive",
    "core/interpreters.py": "the parameters of a JAX primitive",
    "core/jax_compat.py": "the parameters of a JAX primitive",
    "integrations/equinox.py": "the arguments of Equinox's layer",
    "integrations/flax/models.py": "the arguments of a Linen model",
    "integrations/flax/with_options.py": "the arguments that a layer passes",
    "integrations/penzai.py": "side inputs, which Penzai hands to every layer",
}


def test_no_function_of_the_library_takes_untyped_keywords():
    """Arguments travel in dataclasses; `**kwargs: Any` would lose their names and types."""
    found = set()
    for path in FILES[LIBRARY]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None:
                annotation = node.args.kwarg.annotation
                if annotation is None or ast.unparse(annotation) in ("Any", "object"):
                    found.add(path.relative_to(LIBRARY).as_posix())
    assert found == _UNKNOWN_NAMES.keys()


_ANY_IN_TOOLS = {
    "bench": (93, "other packages' modules, compiled programs, and the JSON of calls and reports"),
    "pictures": (16, "arguments under names that options give, and Matplotlib"),
    "rates": (4, "the JSON of measured calls"),
    "reports": (4, "the JSON of a report, Matplotlib, and CUDA's devices"),
    "terminal": (3, "argparse's subparsers, and rich's bar, which need not be installed"),
    "verify": (42, "fields of cases by name, JAX's traced programs, and the JSON of reports"),
}
"""How often each folder of the tools has `Any` in its annotations, and for what."""


def test_the_tools_have_no_more_any_than_is_listed():
    found: Counter[str] = Counter()
    for path in FILES[TOOLS]:
        nodes = ast.walk(ast.parse(path.read_text()))
        uses = sum(isinstance(x, ast.Name) and x.id == "Any" for x in nodes)
        found[path.relative_to(TOOLS).parts[0]] += uses
    assert +found == {folder: number for folder, (number, _) in _ANY_IN_TOOLS.items()}


def test_the_quick_tests_exist_and_cover_every_folder():
    """`make check` runs the files that quick.txt lists, each once."""
    listed = (TESTS / "quick.txt").read_text().splitlines()
    assert listed == sorted(set(listed))
    assert [x for x in listed if not (ROOT / x).is_file()] == []
    folders = {x.parent.name for x in LIBRARY.glob("*/__init__.py")}
    assert folders - {Path(x).parts[1] for x in listed} <= _NOT_QUICK


_NOT_QUICK = {"fa4"}  # the tests compute the kernels' arithmetic in NumPy, which takes long
