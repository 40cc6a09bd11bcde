"""`attn-dispatch explain-program`: a program by its name, its arrays, and the check."""

from __future__ import annotations

import sys

import pytest

from attn_dispatch_tools import cli
from tests.support.backend import needs_cudnn

PROGRAMS = """
import jax
import jax.numpy as jnp
from attn_dispatch import dot_product_attention

def attend(x, y=None):
    y = x if y is None else y
    return dot_product_attention(x, y, y, is_causal=True)

class Model:
    @staticmethod
    def loss():
        x = jnp.ones((2, 128, 4, 64), jnp.bfloat16)
        raise_if_run = jax.pure_callback(lambda: 1 / 0, jax.ShapeDtypeStruct((), jnp.bfloat16))
        return jax.grad(lambda x: attend(raise_if_run * x).astype(jnp.float32).sum())(x)

def on_mesh(x):
    x = jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec("data"))
    return jax.shard_map(attend, in_specs=jax.sharding.PartitionSpec("data"),
                         out_specs=jax.sharding.PartitionSpec("data"))(x)

def stop(x):
    raise SystemExit(0)

number = 3
in_c = dict
"""
MODULE = "programs_to_explain"


@pytest.fixture
def output_of(tmp_path, monkeypatch, capsys):
    (tmp_path / f"{MODULE}.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # removed again, with what the command adds
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def run(program: str, *words: str) -> str:
        cli.main(["explain-program", f"{MODULE}:{program}", *words])
        return capsys.readouterr().out

    return run


@needs_cudnn
def test_a_program_without_arguments(output_of):
    text = output_of("Model.loss", "--target", "h100", "--check")
    assert "program   loss: 1 attention call of attn_dispatch" in text
    assert f"line      {MODULE}.py:8, in attend" in text
    assert "runs      forward 1; backward 1" in text
    assert "forward   cudnn   runs: scratch memory " in text and "eng" not in text
    text = output_of("Model.loss", "--target", "h100", "--verbose")
    assert "forward   cudnn   runs: eng" in text


def test_arrays_in_order_and_by_name(output_of):
    text = output_of("attend", "f32[1,8,2,4]", "y=f32[1,16,2,4]", "--target", "cpu")
    assert "query float32[1, 8, 2, 4], key float32[1, 16, 2, 4]" in text


def test_with_a_mesh_the_share_of_one_device_is_listed(output_of):
    words = ("f32[8,8,2,4]", "--target", "cpu", "--mesh", "data=4,model=1")
    text = output_of("on_mesh", *words)
    assert "query float32[2, 8, 2, 4]" in text
    assert "share     one device's part, in a shard_map over 'data' (4)" in text


def test_a_check_that_fails_ends_with_the_reasons(output_of):
    with pytest.raises(SystemExit, match="got these without:") as stop:
        output_of("attend", "f32[1,8,2,4]", "--target", "h100", "--check")
    assert "cannot run:" in str(stop.value)


def test_a_check_allows_the_named_implementations(output_of):
    words = ("attend", "bf16[1,8,2,64]", "--target", "gfx942", "--check", "--implementation")
    assert "forward   aiter   runs:" in output_of(*words, "aiter", "--implementation", "cudnn")
    wrong = "expected cudnn for every attention, got these without:"
    with pytest.raises(SystemExit, match=wrong) as stop:
        output_of(*words, "cudnn")
    assert "name one that runs on this device: 'aiter', 'xla'" in " ".join(str(stop.value).split())


def test_a_function_without_a_signature_is_called(output_of):
    assert "no attention call" in output_of("in_c", "x=f32[1,8,2,4]", "--target", "cpu")


def test_a_missing_module_is_an_error(output_of):
    for module in ("nowhere", "nowhere.train"):
        with pytest.raises(SystemExit, match=rf"got no module '{module}' in /.* or elsewhere on"):
            cli.main(["explain-program", f"{module}:step"])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("train.py", "train"),
        ("./train.py", "train"),
        ("models/train.py", "models.train"),
        ("../train.py", "train"),
    ],
)
def test_a_path_is_an_error_with_the_name_of_the_module(path, name):
    with pytest.raises(SystemExit) as stop:
        cli.main(["explain-program", f"{path}:Model.step"])
    assert str(stop.value) == (
        "error: expected MODULE:FUNCTION like train:step, got the path "
        f"{path!r} (remedy: name the module, {name}:Model.step)"
    )


@pytest.mark.parametrize("name", ["stop", "attend"], ids=["when traced", "when imported"])
def test_a_program_that_exits_fails_the_check(output_of, tmp_path, name):
    if name == "attend":
        with (tmp_path / f"{MODULE}.py").open("a") as module:
            module.write("raise SystemExit(0)")
    with pytest.raises(SystemExit) as stop:
        output_of(name, "bf16[2,128,4,64]", "--target", "h100", "--check")
    message = f"error: {MODULE}:{name} called sys.exit(0) while it was imported or traced"
    assert str(stop.value.code).startswith(message)
