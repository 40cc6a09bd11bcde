"""`attn-dispatch plan`: plans of calls in a JSON file, for a device that need not be present."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import attn_dispatch
from attn_dispatch import environment, inspection
from attn_dispatch.cudnn import plan_store
from attn_dispatch_tools.cli import main
from attn_dispatch_tools.written_calls.json_file import calls_in
from tests.support.backend import needs_cudnn

DENSE = {
    "query": "bfloat16[2,256,4,64]",
    "key": "bfloat16[2, 256, 2, 64]",
    "value": "key",
    "is_causal": True,
    "local_window_size": [127, 0],
}
RAGGED = {
    "query": "bfloat16[512,4,64]",
    "key": "bfloat16[512,2,64]",
    "value": "key",
    "cu_seqlens_q": "int32[5]",
    "cu_seqlens_kv": "cu_seqlens_q",
    "max_seqlen_q": 256,
    "max_seqlen_kv": 256,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "calls.json"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(plan_store.FOLDER, str(tmp_path / "plans"))
    return tmp_path / "plans"


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def test_a_call_of_the_file_has_the_spec_of_the_call_in_python(file):
    file.write_text(json.dumps([DENSE, RAGGED]))
    (_, dense), (_, ragged) = calls_in(file)
    assert dense == inspection.spec_of(
        query=array(2, 256, 4, 64), key=array(2, 256, 2, 64), value=array(2, 256, 2, 64),
        is_causal=True, local_window_size=(127, 0),
    )  # fmt: skip
    ends = jax.ShapeDtypeStruct((5,), jnp.int32)
    assert ragged == inspection.spec_of(
        query=array(512, 4, 64), key=array(512, 2, 64), value=array(512, 2, 64),
        cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=256, max_seqlen_kv=256,
    )  # fmt: skip
    assert ragged.options.meaning.same_lengths


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "expected JSON"),
        ('{"query": 1}', "expected a list of objects"),
        ('[{"query": "bfloat16[2,4,1,8]"}]', "call 1: missing a required argument: 'key'"),
        (
            json.dumps([DENSE, DENSE | {"causal": True}]),
            "unexpected keyword argument 'causal': here it is is_causal",
        ),
        (json.dumps([DENSE | {"key": "bfloat16[2,256,3,64]"}]), "call 1: "),
        (json.dumps([DENSE | {"key": "bfloat17[2,256,2,64]"}]), "bfloat17"),
        (json.dumps([DENSE | {"key": "the key"}]), "call 1: key: expected an array as 'bfloat16[2"),
        ("[]", "expected at least one call, got an empty list"),
        (json.dumps([DENSE | {"mask": "bool[b,1,1,8]"}]), "call 1: mask: expected an array as"),
    ],
)
def test_a_wrong_call_is_refused(file, content, message):
    file.write_text(content)
    with pytest.raises(SystemExit, match="error: ") as caught:
        main(["plan", "--target", "sm90", str(file)])
    assert message in str(caught.value)


def test_the_command_needs_a_target_and_a_folder_for_plans(file, folder, monkeypatch):
    file.write_text(json.dumps([DENSE]))
    for target in ([], ["--target", "gfx942"]):
        with pytest.raises(SystemExit, match="name a --target"):
            main(["plan", *target, str(file)])
    monkeypatch.setenv(plan_store.FOLDER, environment.OFF)
    with pytest.raises(SystemExit, match="plans are not kept"):
        main(["plan", "--target", "sm90", str(file)])
    monkeypatch.setenv(plan_store.FOLDER, str(file / "plans"))
    with pytest.raises(SystemExit, match="plans cannot be kept in"):
        main(["plan", "--target", "sm90", str(file)])
    with pytest.raises(SystemExit, match="none: no such file"):
        main(["plan", "--target", "sm90", str(file.with_name("none"))])
    assert not folder.exists()


@needs_cudnn
def test_the_plans_of_a_call_are_written(file, folder, capsys):
    file.write_text(json.dumps([DENSE]))
    main(["plan", "--target", "sm90", "--inference", str(file)])
    assert len(list(folder.glob("*.plan"))) == 1
    main(["plan", "--target", "sm90", str(file)])
    assert len(list(folder.glob("*.plan"))) == 3
    message = capsys.readouterr().out
    assert str(folder) in message and message.count("cudnn: scratch memory ") == 4
    assert not re.search(r"\beng\d", message)
    main(["plan", "--target", "sm90", "--inference", "--verbose", str(file)])
    assert re.search(r"cudnn: eng\d+\S*,\s+scratch\s+memory ", capsys.readouterr().out)


@needs_cudnn
def test_the_plans_are_those_that_training_needs(file, folder):
    # No other test has this batch: a process does not write a plan twice.
    file.write_text(json.dumps([DENSE | {x: "bfloat16[3,256,4,64]" for x in ("query", "key")}]))
    main(["plan", "--target", "sm90", str(file)])
    written = {x.name for x in folder.iterdir()}

    def call(q: jax.Array, k: jax.Array) -> jax.Array:
        return attn_dispatch.dot_product_attention(
            q, k, k, is_causal=True, local_window_size=(127, 0), implementation="cudnn"
        )

    def step(q: jax.Array, k: jax.Array) -> Any:
        out, pull = jax.vjp(call, q, k)
        return pull(out)

    arrays = array(3, 256, 4, 64), array(3, 256, 4, 64)
    with attn_dispatch.target("sm90"):
        for function in (call, step):
            jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert len(written) == 3 and {x.name for x in folder.iterdir()} == written


@needs_cudnn
def test_plans_that_cannot_be_written_are_an_error(file, folder, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    # No other test has this shape: a process does not write a plan twice.
    call = {"query": "bfloat16[5,320,4,64]", "key": "query", "value": "query"}
    file.write_text(json.dumps([call]))
    monkeypatch.setattr(plan_store.os, "replace", full)
    with pytest.raises(SystemExit, match="not all plans are kept: No space left on device"):
        main(["plan", "--target", "sm90", str(file)])
    assert not list(folder.glob("*.plan"))
    assert not plan_store.write_failures(folder.parent), "no failure is recorded for another folder"


@needs_cudnn
def test_a_refused_call_gives_status_1(file, folder, capsys):
    file.write_text(json.dumps([DENSE | {x: "float32[2,256,4,64]" for x in ("query", "key")}]))
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--target", "sm90", str(file)])
    assert caught.value.code == 1
    assert "refused: needs float16 or bfloat16, got float32" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_the_reason_against_a_plan_fits_the_terminal(
    file, folder, capsys, monkeypatch, columns: int
):
    monkeypatch.setenv("COLUMNS", str(columns))
    file.write_text(json.dumps([{"query": "f32[2,8,1,4]", "key": "query", "value": "query"}]))
    with pytest.raises(SystemExit):
        main(["plan", "--target", "h200", "--inference", str(file)])
    lines = capsys.readouterr().out.splitlines()
    message = lines[lines.index(next(x for x in lines if "as it is" in x)) :]
    assert max(map(len, message)) <= columns
    assert "got float32" in " ".join(" ".join(message).split())
