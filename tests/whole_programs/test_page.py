"""docs/programs.md: its output is real, and its check fails if one layer falls back."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from attn_dispatch_tools import cli
from tests.support.backend import needs_cudnn
from tests.support.repository import ROOT
from tests.support.shown_times import without_predicted_times

PAGE = (ROOT / "docs/programs.md").read_text("utf-8")
PROGRAM, _, _, EINSUM, CHECK = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CALL = "dot_product_attention(q, k, v, is_causal=True)"


def names_of(code: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    names = {} if names is None else names
    exec(compile(code, "train.py", "exec"), names)
    return names


def without_engines(text: str) -> str:
    text = re.sub(r"eng\S+, scratch memory \S+ \w+", "ENGINE", text)
    return without_predicted_times(text).strip()


@needs_cudnn
def test_the_page_shows_what_the_first_snippet_prints(capsys):
    names_of(PROGRAM)
    shown, _ = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert without_engines(shown) == without_engines(capsys.readouterr().out)


def test_the_line_of_the_einsum_attention_is_as_the_page_says(capsys):
    names = names_of("import jax, jax.numpy as jnp\nfrom attn_dispatch import explain_program")
    names["struct"] = names["jax"].ShapeDtypeStruct
    names_of(EINSUM, names)
    assert "train.py:2, in by_einsum: attention by matrix products" in capsys.readouterr().out


ONE_LAYER = {
    "is not called with 16 bits": (
        f"{CALL} if weights is not params[2] else dot_product_attention("
        "q.astype(jnp.float32), k.astype(jnp.float32), v.astype(jnp.float32)).astype(y.dtype)",
        "needs float16 or bfloat16, got float32",
    ),
    "is an einsum": (
        f"{CALL} if weights is not params[2] else jnp.einsum("
        "'bnts,bsnh->btnh', jax.nn.softmax(jnp.einsum('btnh,bsnh->bnts', q, k)), v)",
        r"train\.py:11, in step\.<locals>\.loss: attention by matrix products",
    ),
    "is on jax.nn": (
        f"{CALL} if weights is not params[2] else jax.nn.{CALL}",
        r"jax\.nn\.dot_product_attention on XLA",
    ),
}


@needs_cudnn
@pytest.mark.parametrize("case", ONE_LAYER)
def test_the_check_fails_if_one_layer_is_not_on_a_kernel(case: str):
    names_of(CHECK)["test_every_layer_runs_on_a_kernel"]()
    assert CHECK.count(CALL) == 1
    instead, message = ONE_LAYER[case]
    changed = names_of(CHECK.replace(CALL, instead))
    with pytest.raises(AssertionError, match=message):
        changed["test_every_layer_runs_on_a_kernel"]()


@needs_cudnn
def test_the_command_checks_the_program_of_the_page(tmp_path, monkeypatch, capsys):
    (command,) = re.findall(r"^attn-dispatch (explain-program train:.*)$", PAGE, re.M)
    (tmp_path / "train.py").write_text(CHECK, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # removed again, with what the command adds
    monkeypatch.delitem(sys.modules, "train", raising=False)
    cli.main(command.split())
    assert "runs      forward 4; backward 4" in capsys.readouterr().out
