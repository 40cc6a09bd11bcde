"""build-fa4 --mod: the score_mods that it finds, and those that it refuses."""

from __future__ import annotations

import argparse
import subprocess
import sys

import jax.numpy as jnp
import pytest

from attn_dispatch import mods
from attn_dispatch.fa4.score_variant import ScoreChange, variant_of
from attn_dispatch.programs.tracing import trace
from attn_dispatch_tools.build_fa4 import command
from attn_dispatch_tools.build_fa4.score_mods import variant
from attn_dispatch_tools.terminal.building import BuildError
from tests.support import fa4_stand_in
from tests.support.repository import environment

_MODEL = """\
import jax.numpy as jnp
SLOPES = jnp.ones(4)

def score_mod(score, b, n, t, s):
    return score * SLOPES[n]

def sorts(score, b, n, t, s):
    return score + jnp.sort(SLOPES)[0]

def no_mod(score):
    return score

class Config:
    @staticmethod
    def mod(score, b, n, t, s):
        return score + 1

def returns_nothing(x):
    pass

def looks_up(score, b, n, t, s):
    return {}["cap"] * score

def fails(x):
    if x == 4:
        raise RuntimeError("first\\nsecond")
    raise ValueError(f"no mod for {x}")
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A module my_model in the current folder."""
    (tmp_path / "my_model.py").write_text(_MODEL)
    (tmp_path / "unfinished.py").write_text("def mod(")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("my_model", None)  # another test's
    yield tmp_path
    sys.modules.pop("my_model", None)


def digest_of_call(mod) -> str:
    program = trace("score_mod", mod, (), "float32").program
    return variant_of(ScoreChange(score_mod=program)).digest


def test_a_function_of_a_module_in_the_current_folder(model):
    found = variant("my_model:score_mod")
    slopes = jnp.zeros(16)
    assert found.digest == digest_of_call(lambda x, b, n, t, s: x * slopes[n])
    assert (found.name, found.types) == ("my_model:score_mod", "if")
    assert variant("my_model:Config.mod").digest == digest_of_call(lambda x, b, n, t, s: x + 1)


def test_ready_made_mods_are_those_of_the_arguments():
    for text in ("attn_dispatch.mods:soft_cap(50)", "attn_dispatch.mods:soft_cap(cap=50.0)"):
        assert variant(text).digest == variant_of(ScoreChange(soft_cap=50.0)).digest
        assert variant(text).backward == variant_of(ScoreChange(soft_cap=50.0)).backward
    slopes = variant("attn_dispatch.mods:alibi([1.0, 0.5])")
    assert slopes.digest == variant_of(ScoreChange(has_slopes=True)).digest
    table = mods.relative_position(jnp.zeros((4, 2)), max_distance=9)
    text = "attn_dispatch.mods:relative_position([[0.0, 0.0]] , max_distance=9)"
    with pytest.raises(BuildError, match="expected an even number of buckets from 4 on, got 1"):
        variant(text)
    text = text.replace("[[0.0, 0.0]]", str([[0.0, 0.0]] * 4))
    assert variant(text).digest == digest_of_call(table)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("my_model", r"expected MODULE:FUNCTION, such as .*, got 'my_model'"),
        (":score_mod", r"expected MODULE:FUNCTION, such as .*, got ':score_mod'"),
        ("my_model:", r"expected MODULE:FUNCTION, such as .*, got 'my_model:'"),
        ("my_model:a + b", r"expected MODULE:FUNCTION, such as .*, got 'my_model:a \+ b'"),
        ("my_model:fails(open)", r"expected MODULE:FUNCTION, such as .*"),
        ("no_model:score_mod", r"no_model:score_mod: No module named 'no_model'"),
        ("my_model:other", r"my_model:other: module 'my_model' has no attribute 'other'"),
        ("my_model:fails(3)", r"my_model:fails\(3\): no mod for 3"),
        ("my_model:looks_up", r"my_model:looks_up: KeyError: 'cap'$"),
        ("my_model:fails(4)", r"my_model:fails\(4\): RuntimeError: first$"),
        ("unfinished:mod", r"unfinished:mod: SyntaxError: "),
        ("my_model:fails()", r"my_model:fails\(\): fails\(\) missing 1 required"),
        ("my_model:SLOPES", r"score_mod: expected a function or None, got an array float32\[4\]"),
        ("my_model:returns_nothing(1)", r"score_mod: expected a function or None, got None"),
        ("my_model:no_mod", r"expected a function of \(score, b, n, t, s\), got one of \(score\)"),
        ("my_model:sorts", r"sort of arrays; .* \(at my_model.py:8\)"),
    ],
)
def test_what_is_no_score_mod_is_refused(model, text: str, sentence: str):
    with pytest.raises(BuildError, match=sentence) as caught:
        variant(text)
    assert str(caught.value).startswith("--mod")


def test_too_many_arrays_are_refused(monkeypatch):
    arrays = [jnp.ones(3) for _ in range(17)]

    def many(score, b, n, t, s):
        return score + sum(x[t] for x in arrays)

    monkeypatch.setattr(sys.modules[__name__], "many", many, raising=False)
    with pytest.raises(BuildError, match="reads 17 arrays, of at most 16"):
        variant(f"{__name__}:many")


def _run(*arguments: object) -> None:
    parser = argparse.ArgumentParser(prog="attn-dispatch")
    command.add_parser(parser.add_subparsers(required=True), help="")
    args = parser.parse_args(["build-fa4", *map(str, arguments)])
    args.run(args)


def test_the_command_compiles_the_sets_with_each_mod_once(model, monkeypatch, capsys):
    stand_in = fa4_stand_in.python(model)
    monkeypatch.setattr(command.fa4_folder, "cache", lambda: model / "cache")
    monkeypatch.setenv("CC", str(fa4_stand_in.linker(model)))
    arguments = ("--python", stand_in.path, "--out", model / "out", "--set", "*_d64_bfloat16")
    texts = ["attn_dispatch.mods:soft_cap(9.0)", "attn_dispatch.mods:soft_cap(cap=9)"]
    _run(*arguments, *(x for y in (*texts, "my_model:score_mod") for x in ("--mod", y)))
    made = [variant(x) for x in ("attn_dispatch.mods:soft_cap(9)", "my_model:score_mod")]
    names = [f"sm90_d64_bfloat16{x}" for x in ("", *(f"_{y.digest}" for y in made))]
    assert sorted(stand_in.taken()[-3:]) == sorted(names)
    assert ": 3 sets, 2 of them with a score_mod, " in capsys.readouterr().out
    code = (
        "import sys; from pathlib import Path; from attn_dispatch.fa4 import compiled;"
        "from tests.support import fa4_emulated;"
        "found = compiled.load(fa4_emulated.module(), Path(sys.argv[1]));"
        "print(found.unusable_reason, *((x.name, x.variant_name) for x in found.sets))"
    )
    library = str(model / "out" / command.fa4_folder.LIBRARY)
    done = subprocess.run(
        [sys.executable, "-c", code, library],
        capture_output=True, text=True, env=environment(), timeout=120,
    )  # fmt: skip
    titles = ["", texts[1], "my_model:score_mod"]
    expected = " ".join(str(x) for x in zip(names, titles, strict=True))
    assert done.stdout.strip() == expected, done.stderr


def test_a_wrong_mod_leaves_no_folder(tmp_path):
    with pytest.raises(SystemExit, match="error: --mod: expected MODULE:FUNCTION"):
        _run("--mod", "nothing", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
