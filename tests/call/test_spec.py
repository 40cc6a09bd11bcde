"""AttentionSpec: the facts that it derives from shapes, and its equality as a value."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch.aiter.call import call_of as aiter_call_of
from attn_dispatch.call.context import Context
from attn_dispatch.call.operands import Operand
from attn_dispatch.call.options import as_partners, backward_options
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch.flash.call import call_of as flash_call_of
from attn_dispatch.programs.tracing import trace
from attn_dispatch.settings import CallSettings
from attn_dispatch_tools.verify.case import Case
from tests.support.backend import forward_spec
from tests.support.option_parts import PARTS, options_with, with_facts
from tests.support.present import present

SHAPES = {"query": (2, 3, 8, 16), "key": (2, 5, 4, 16), "value": (2, 5, 4, 24)}
OPTIONS = options_with(operands=tuple(SHAPES), scale=0.25)


def avals(dtype: str = "bfloat16", /, **shapes: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in (SHAPES | shapes).values()]


def backward(*gradients: str, has_lse_grad: bool = False, dtype: str = "bfloat16") -> AttentionSpec:
    options = backward_options(OPTIONS, gradients, has_lse_grad=has_lse_grad)
    out, lse = (2, 3, 8, 24), jax.ShapeDtypeStruct((2, 8, 3), jnp.float32)
    residuals = [jax.ShapeDtypeStruct(out, dtype), lse, jax.ShapeDtypeStruct(out, dtype)]
    more = [lse] if has_lse_grad else []
    return AttentionSpec.of([*avals(dtype), *residuals, *more], options)


def test_facts_derived_from_shapes():
    spec = AttentionSpec.of(avals(), OPTIONS)
    facts = {
        "batch": 2, "seq_len_q": 3, "seq_len_kv": 5, "num_heads": 8, "num_kv_heads": 4,
        "head_dim": 16, "head_dim_v": 24, "dtype": "bfloat16", "lse_dtype": "float32",
        "is_empty": False, "is_backward": False,
    }  # fmt: skip
    assert {name: getattr(spec, name) for name in facts} == facts
    assert spec.operands[1] == Operand("key", (2, 5, 4, 16), "bfloat16")
    assert spec.shape("value") == (2, 5, 4, 24)
    assert spec.has("key") and not spec.has("bias")


def test_arrays_avals_and_tracers_make_the_same_spec():
    arrays = [jnp.zeros(x.shape, x.dtype) for x in avals()]
    expected = AttentionSpec.of(avals(), OPTIONS)
    assert AttentionSpec.of(arrays, OPTIONS) == expected
    seen = []
    jax.eval_shape(lambda *x: seen.append(AttentionSpec.of(x, OPTIONS)), *arrays)
    assert seen == [expected]


@pytest.mark.parametrize("call_of", [variants_of, flash_call_of, aiter_call_of])
def test_no_sequence_is_longer_than_the_rows_there_are(call_of):
    """A server's bound may be beyond the arrays of one step."""
    case = Case("call", b=1, t=10, s=10, cu_q=((0, 3, 3, 10),), cu_kv=((0, 1, 8, 10),))
    rows, beyond = (forward_spec(replace(case, longest=x)) for x in ((10, 10), (11, 2**20)))
    assert call_of(beyond) == call_of(rows)


def test_wrong_number_of_operands_raises():
    with pytest.raises(ValueError, match=r"expected 3 operands \('query', 'key', 'value'\), got 2"):
        AttentionSpec.of(avals()[:2], OPTIONS)


@pytest.mark.parametrize(
    ("dtype", "lse"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_shapes_and_dtypes_of_forward_results(dtype: str, lse: str):
    with jax.enable_x64(True):
        spec = AttentionSpec.of(avals(dtype), OPTIONS)
        assert [(x.shape, x.dtype) for x in spec.results] == [((2, 3, 8, 24), dtype)]
        spec = AttentionSpec.of(avals(dtype), with_facts(OPTIONS, needs_lse=True))
        assert [(x.shape, x.dtype) for x in spec.results] == [
            ((2, 3, 8, 24), dtype),
            ((2, 8, 3), lse),
        ]


def test_order_of_forward_results():
    spec = AttentionSpec.of(avals(), with_facts(OPTIONS, needs_max=True, needs_keep=True))
    assert spec.result_names == ("out", "row_max", "keep")
    assert [(x.shape, x.dtype) for x in spec.results[1:]] == [
        ((2, 8, 3), "float32"), ((2, 8, 3, 5), "bool")
    ]  # fmt: skip
    with_lse = with_facts(spec.options, needs_lse=True)
    assert AttentionSpec.of(avals(), with_lse).result_names == ("out", "lse", "row_max", "keep")
    backward = backward_options(with_lse, ("key",), has_lse_grad=False)
    assert not (backward.wanted.needs_max or backward.wanted.needs_keep)


def test_backward_results_are_the_wanted_gradients_in_order():
    spec = backward("value", "query")
    assert spec.is_backward
    assert [(x.shape, x.dtype) for x in spec.results] == [
        (SHAPES["value"], "bfloat16"),
        (SHAPES["query"], "bfloat16"),
    ]
    assert not spec.has("lse_grad")
    assert backward("key", has_lse_grad=True).has("lse_grad")


def test_backward_options_add_residuals_and_cotangents_to_the_forward_options():
    options = backward_options(OPTIONS, ("key",), has_lse_grad=False)
    assert options.operands == ("query", "key", "value", "out", "lse", "out_grad")
    assert options.wanted.gradients == ("key",)
    assert backward_options(OPTIONS, (), has_lse_grad=True).operands[3:] == (
        "out", "lse", "out_grad", "lse_grad",
    )  # fmt: skip
    # All other options are those of the forward call.
    assert with_facts(options, operands=OPTIONS.operands, gradients=()) == OPTIONS


def test_partner_specs_refer_to_each_other_under_dropout():
    backward = backward_options(OPTIONS, ("key", "query"), has_lse_grad=True)
    assert as_partners(OPTIONS, backward) == (OPTIONS, backward)
    options = with_facts(OPTIONS, dropout_rate=0.5, needs_max=True)
    backward = backward_options(options, ("key", "query"), has_lse_grad=True)
    forward, with_partner = as_partners(options, backward)
    spec = AttentionSpec.of(avals(), forward)
    assert spec.partner is not None and spec.partner.options == backward
    assert [x.name for x in spec.partner.operands] == list(backward.operands)
    again = present(AttentionSpec.of(spec.partner.operands, with_partner).partner)
    assert again == AttentionSpec.of(avals(), options)
    assert again.partner is None


def test_specs_compare_and_hash_by_value():
    spec, again = (AttentionSpec.of(avals(), OPTIONS) for _ in range(2))
    assert spec == again and hash(spec) == hash(again)
    assert spec.batch == 2 and hash(spec) == hash(again)  # caching a fact leaves the hash alone
    others = [
        AttentionSpec.of(avals("float16"), OPTIONS),
        AttentionSpec.of(avals(query=(2, 4, 8, 16)), OPTIONS),
        backward("query"),
        *(AttentionSpec.of(avals(), with_facts(OPTIONS, **change)) for change in _CHANGES),
    ]
    assert len({spec, *others}) == 1 + len(others)
    with pytest.raises(FrozenInstanceError):
        spec.options = OPTIONS  # pyright: ignore


MOD = trace("score_mod", lambda score, b, n, t, s: jnp.tanh(score), (), "float32").program

_CHANGES = (
    {"scale": 0.5}, {"is_causal": True}, {"causal_alignment": "bottom_right"},
    {"causal_offset": 3},
    {"window": (1, None)}, {"logits_soft_cap": 2.0}, {"dropout_rate": 0.5},
    {"dropout_impl": "rbg"}, {"deterministic_backward": True}, {"score_mod": MOD},
    {"mask_mod": MOD},
    {"implementation": ("xla",)}, {"needs_lse": True}, {"max_seq_lens": (3, 5)},
    {"same_lengths": True}, {"whole_pages": True}, {"value_page": 1},
    {"context": Context(("x",), 2)}, {"is_part": True},
    {"is_checked": True}, {"ignores_padding_rows": True}, {"cleared_padding": True},
    {"finite_padding": True},
    {"heads_first_q": True}, {"heads_first_kv": True},
    {"max_segments": 4}, {"needs_max": True}, {"needs_keep": True}, {"partner": OPTIONS},
    {"derivative": "forward-mode derivative"},
    {"differentiated": ("query",)}, {"engine": "6 STREAM_K=1"},
    {"settings": CallSettings((("fallback", "error"),))},
)  # fmt: skip


def test_every_option_distinguishes_specs():
    """Calls that differ in one option must not share cached results."""
    changed = {name for change in _CHANGES for name in change}
    facts = {x.name for part in PARTS for x in fields(getattr(OPTIONS, part))}
    others = {"engine", "settings"}
    assert {x.name for x in fields(OPTIONS)} == {"operands", *others, *PARTS}
    assert changed == (facts | others) - {"gradients"}


@pytest.mark.parametrize(
    ("shapes", "is_empty"),
    [
        ({"query": (0, 3, 8, 16), "key": (0, 5, 4, 16), "value": (0, 5, 4, 24)}, True),
        ({"query": (2, 0, 8, 16)}, True),
        ({"query": (2, 3, 0, 16)}, True),
        ({"key": (2, 0, 4, 16), "value": (2, 0, 4, 24)}, True),
        ({"query": (2, 3, 8, 0), "key": (2, 5, 4, 0)}, False),
        ({"value": (2, 5, 4, 0)}, False),
    ],
)
def test_spec_without_queries_or_keys_is_empty(shapes: dict[str, tuple[int, ...]], is_empty: bool):
    assert AttentionSpec.of(avals(**shapes), OPTIONS).is_empty is is_empty


def test_text_of_a_spec_has_arrays_and_options():
    text = str(AttentionSpec.of(avals(), OPTIONS))
    arrays = "query bfloat16[2, 3, 8, 16], key bfloat16[2, 5, 4, 16], value bfloat16[2, 5, 4, 24]"
    assert text == f"forward({arrays}, scale=0.25)"
    options = with_facts(
        OPTIONS, is_causal=True, causal_alignment="bottom_right", window=(3, None),
        logits_soft_cap=30.0, dropout_rate=0.1, deterministic_backward=True, score_mod=MOD,
        max_segments=7, needs_max=True, needs_keep=True,
    )  # fmt: skip
    assert str(AttentionSpec.of(avals(), options)) == (
        f"forward({arrays}, scale=0.25, causal bottom_right, window=(3, None), "
        "logits_soft_cap=30, max_segments=7, dropout_rate=0.1, deterministic_backward, score_mod "
        "{ lambda ; a:f32[] b:i32[] c:i32[] d:i32[] e:i32[]. let f:f32[] = tanh a in (f,) }, "
        "row maximum, dropout mask)"
    )
    text = str(backward("query", "value"))
    assert text.startswith("backward(query bfloat16[2, 3, 8, 16], ")
    assert "lse float32[2, 8, 3]" in text and text.endswith("gradients of query/value)")
