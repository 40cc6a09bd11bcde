"""`attn-dispatch explain`: the notation of a call, the options, and the output."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import pytest

import attn_dispatch
from attn_dispatch_tools import cli
from attn_dispatch_tools.written_calls import notation
from attn_dispatch_tools.written_calls.flags import window
from tests.support.backend import needs_cudnn

CALL = "q=bf16[2,256,8,64] k=bf16[2,512,2,64]"


def struct(dtype, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def output_of(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words: str) -> str:
        cli.main(["explain", *words])
        return capsys.readouterr().out.rstrip("\n")

    return run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, {"query": struct(jnp.bfloat16, 2, 256, 8, 64),
                "key": struct(jnp.bfloat16, 2, 512, 2, 64),
                "value": struct(jnp.bfloat16, 2, 512, 2, 64)}),
        ("query = float16[ 2, 8, 1, 4 ]",
         dict.fromkeys(("query", "key", "value"), struct(jnp.float16, 2, 8, 1, 4))),
        ("q=f32[8,1,4], v=f32[8,1,2]; k=q",
         {"query": struct(jnp.float32, 8, 1, 4), "key": struct(jnp.float32, 8, 1, 4),
          "value": struct(jnp.float32, 8, 1, 2)}),
        ("q=f32[8,1,4] is_causal=true local_window_size=[4, null] scale=-0.5 mask=pred[8,8]"
         " causal_alignment=bottom_right implementation=xla",
         dict.fromkeys(("query", "key", "value"), struct(jnp.float32, 8, 1, 4))
         | {"is_causal": True, "local_window_size": (4, None), "scale": -0.5,
            "mask": struct(jnp.bool_, 8, 8), "causal_alignment": "bottom_right",
            "implementation": "xla"}),
        ("q=bf16[4,1,8,64] key_pages=bf16[9,16,2,64] value_pages=key_pages page_table=s32[4,2]"
         " key_value_seq_lengths=i32[4]",
         {"query": struct(jnp.bfloat16, 4, 1, 8, 64),
          "key_pages": struct(jnp.bfloat16, 9, 16, 2, 64),
          "value_pages": struct(jnp.bfloat16, 9, 16, 2, 64),
          "page_table": struct(jnp.int32, 4, 2), "key_value_seq_lengths": struct(jnp.int32, 4)}),
    ],
)  # fmt: skip
def test_the_notation_gives_arguments(text: str, expected: dict):
    assert notation.arguments(text) == expected


def test_constants_may_be_written_as_in_python():
    found = dict(notation.arguments("q=f32[8,1,4] is_causal=True return_lse=False mask=None"))
    assert found["is_causal"] is True and found["return_lse"] is False and found["mask"] is None


def test_dropout_adds_a_key_to_the_call(output_of):
    by_option = output_of("q=f32[1,8,1,4]", "--dropout", "0.1")
    assert "dropout_key" in by_option
    assert output_of("q=f32[1,8,1,4] dropout_rate=0.1") == by_option


def test_an_array_named_twice_is_one_array():
    found = dict(
        notation.arguments("q=bf16[64,2,64] cu_seqlens_q=i32[3] cu_seqlens_kv=cu_seqlens_q")
    )
    assert found["cu_seqlens_q"] is found["cu_seqlens_kv"]
    assert found["query"] is found["key"] is found["value"]


def test_the_output_is_that_of_explain(output_of):
    q, kv = struct(jnp.bfloat16, 2, 256, 8, 64), struct(jnp.bfloat16, 2, 512, 2, 64)
    assert output_of(CALL) == str(attn_dispatch.explain(q, kv, kv))
    expected = attn_dispatch.explain(
        q, kv, kv, is_causal=True, causal_alignment="bottom_right", local_window_size=(127, None),
        logits_soft_cap=30.0, scale=0.5, target="h100",
    )  # fmt: skip
    flags = ["--causal", "--bottom-right", "--window", "127,none", "--soft-cap", "30"]
    words = (CALL, *flags, "--scale", "0.5", "--target", "H100")
    assert output_of(*words, "--verbose") == str(expected)
    assert output_of(*words) == expected.text(codes=False)
    ids = struct(jnp.int32, 2, 256)
    expected = attn_dispatch.explain(
        q, q, q, query_segment_ids=ids, max_segments=4, alibi_slopes=struct(jnp.float32, 8),
        sinks=struct(jnp.float32, 8), deterministic_backward=True, return_lse=True,
        target="mi300x",
    )  # fmt: skip
    flags = ["--segments", "4", "--alibi", "--sinks", "--deterministic", "--lse"]
    assert output_of("q=bf16[2,256,8,64]", *flags, "--target", "mi300x") == str(expected)


def test_options_for_segments_lengths_and_dropout_add_arrays(output_of):
    text = output_of(CALL, "--segments", "4")
    assert "query_segment_ids" in text and "key_value_segment_ids" in text
    assert "key_value_seq_lengths" in output_of(CALL, "--lengths")
    assert "dropout_rate=0.5" in output_of(CALL, "--dropout", "0.5")


def test_zero_is_passed_on_as_a_value(output_of):
    assert "scale=0" in output_of(CALL, "--scale", "0")
    assert "window=(0, 0)" in output_of(CALL, "--window", "0")


def test_a_call_needs_no_quotes(output_of):
    assert output_of(*CALL.split(), "--causal") == output_of(CALL, "--causal")


def test_the_calls_of_a_file_are_explained(output_of, tmp_path):
    file = tmp_path / "calls.json"
    call = {"query": "bfloat16[2,256,8,64]", "key": "bf16[2,512,2,64]", "value": "key"}
    file.write_text(json.dumps([call, call | {"is_causal": True}]))
    first, second = output_of(str(file)).split("\n\n")
    assert first == output_of(CALL) and second == output_of(CALL, "--causal")
    file.write_text(json.dumps([call | {"casual": True}]))
    with pytest.raises(SystemExit, match=r"error: .*calls.json: call 1: .*unexpected keyword"):
        cli.main(["explain", str(file)])
    with pytest.raises(SystemExit, match=r"error: .*none.json: no such file"):
        cli.main(["explain", str(tmp_path / "none.json")])


def test_an_implementation_can_be_named(output_of):
    flags = ["--segments", "4", "--alibi", "--sinks", "--target", "h100"]
    heads_first = output_of("q=bf16[2,8,256,64] k=bf16[2,2,512,64] qkv_layout=BNTH", *flags)
    arrays, _ = output_of(CALL, *flags).split("max_segments=4)", 1)
    assert heads_first.startswith(f"{arrays}max_segments=4, heads first in queries")
    assert "forward   xla" in output_of(CALL, "--implementation", "xla")
    with pytest.raises(SystemExit) as status:
        cli.main(["explain", "q=f32[2,256,8,64]", "--implementation", "cudnn", "--target", "h100"])
    assert status.value.code == 1, "no implementation can run the call"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", 4),
        ("4,0", (4, 0)),
        ("none,3", (None, 3)),
        ("3,", (3, None)),
        ("none,none", (None, None)),
    ],
)
def test_a_window_is_one_number_or_two(text: str, expected):
    assert window(text) == expected


@needs_cudnn
def test_engines_of_cudnn_are_named_if_asked(output_of):
    words = (CALL, "--causal", "--target", "h100")
    text = output_of(*words)
    assert "forward   cudnn   runs: scratch memory " in text
    assert "backward  cudnn   runs: scratch memory " in text and "eng" not in text
    assert "forward   xla     runs: dense, scratch" in text, "names that say something stay"
    assert re.search(r"backward  cudnn   runs: eng\d", output_of(*words, "--verbose"))


def test_nothing_chosen_is_none(output_of, capsys):
    with pytest.raises(SystemExit):
        output_of("q=f32[2,256,8,64]", "--implementation", "cudnn", "--target", "h100")
    assert "\nchosen    none\n" in capsys.readouterr().out


@needs_cudnn
def test_the_output_fits_the_terminal(output_of, monkeypatch):
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = output_of(CALL, "--causal", "--target", "h100")
        assert max(map(len, text.splitlines())) <= columns
        assert "chosen    forward: cudnn, backward: cudnn" in text


def test_a_warning_about_conventions_names_no_line_of_python(capsys):
    """The line would be one of the command's own code."""
    cli.main(["explain", "q=f32[2,1,4,8] k=f32[2,9,4,8]", "--causal", "--target", "cpu"])
    warning = capsys.readouterr().err
    assert warning.startswith("warning: is_causal=True with one query and several keys")
    assert "sys.exit" not in warning and ".py" not in warning
