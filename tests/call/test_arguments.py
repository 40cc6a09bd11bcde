"""Every wrong call raises a ValueError that names what was expected and what was given."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain

Q = np.zeros((2, 3, 4, 8), np.float32)
KV = np.zeros((2, 5, 2, 8), np.float32)
KEY = jax.random.key(0)


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


_EXPECTED_NORMAL = "expected a size from 1.18e-38 to 3.4e+38, the normal numbers of float32, got "

_SCALED = ", multiplied by its scale if it has one"

_REMEDY = "; for 0 and 1 pass mask != 0, and for numbers that are added to scores pass bias"

_FLOATS = "; pass bfloat16, float16 or float32"
_EACH_KEY = "; pass a value for each key (the last dim may differ)"
_WRONG_CALLS: tuple[tuple[dict[str, Any], str], ...] = (
    # query, key, value
    ({"query": None}, "query: expected an array, got None"),
    ({"value": None}, "value: expected an array, got None"),
    ({"query": array(4, 8)},
     "query: expected at least 3 dims [..., length, heads, dim], got [4, 8]"),
    ({"key": array(5)}, "key: expected at least 3 dims [..., length, heads, dim], got [5]"),
    ({"value": array()}, "value: expected at least 3 dims [..., length, heads, dim], got []"),
    ({"query": Q.astype(int)}, f"query: expected a floating dtype, got int32{_FLOATS}"),
    ({"query": Q.astype(np.complex64)},
     f"query: expected a floating dtype, got complex64{_FLOATS}"),
    ({"key": KV.astype(bool)}, f"key: expected a floating dtype, got bool{_FLOATS}"),
    ({"key": KV.astype(np.float16)},
     "key: expected query's dtype float32, got float16; pass key.astype(query.dtype)"),
    ({"value": KV.astype(jnp.bfloat16)},
     "value: expected query's dtype float32, got bfloat16; pass value.astype(query.dtype)"),
    ({"key": KV.astype(np.int8), "value": KV.astype(np.int8)},
     f"key: expected a floating dtype, got int8; pass key.astype(query.dtype){_SCALED}"),
    ({"key": KV.astype(jnp.float8_e4m3fn), "value": KV.astype(jnp.float8_e4m3fn)},
     "key: expected query's dtype float32, got float8_e4m3fn; pass key.astype(query.dtype)"
     + _SCALED),
    ({"key": KV.astype(jnp.bfloat16), "value": KV.astype(jnp.bfloat16)},
     "query: expected key's and value's dtype bfloat16, got float32; pass query.astype(key.dtype)"),
    ({"key": array(3, 5, 2, 8)}, "key: expected query's batch dims [2], got [3]"),
    *(
        ({"key": array(*shape)},
         f"key: expected query's batch dims [2], got {list(shape[:-3])}; to use it in each batch "
         "row, pass jnp.broadcast_to(key, (2, 5, 2, 8))")
        for shape in ((1, 5, 2, 8), (5, 2, 8))
    ),
    ({"key": array(1, 2, 5, 2, 8)}, "key: expected query's batch dims [2], got [1, 2]"),
    ({"key": array(2, 5, 2, 7)},
     "key: expected query's head dim 8, got 7; pass arrays with equal last dims (only value's may "
     "differ)"),
    ({"value": array(2, 6, 2, 8)},
     f"value: expected key's batch dims, length and heads [2, 5, 2], got [2, 6, 2]{_EACH_KEY}"),
    ({"value": array(2, 5, 4, 8)},
     f"value: expected key's batch dims, length and heads [2, 5, 2], got [2, 5, 4]{_EACH_KEY}"),
    ({"value": array(3, 5, 2, 8)},
     f"value: expected key's batch dims, length and heads [2, 5, 2], got [3, 5, 2]{_EACH_KEY}"),
    ({"query": array(2, 3, 5, 8)},
     "query: expected the number of heads to be a multiple of key's 2, got 5 "
     "(arrays are [batch, length, heads, dim])"),
    ({"query": array(2, 3, 1, 8)},
     "query: expected the number of heads to be a multiple of key's 2, got 1 "
     "(arrays are [batch, length, heads, dim])"),
    ({"key": array(2, 5, 0, 8), "value": array(2, 5, 0, 8)},
     "query: expected the number of heads to be a multiple of key's 0, got 4 "
     "(arrays are [batch, length, heads, dim])"),
    ({"bias": "alibi"}, "bias: expected an array, got 'alibi'"),
    ({"dropout_rate": 0.1, "dropout_key": "seed"}, "dropout_key: expected an array, got 'seed'"),
    # bias and mask
    ({"mask": array(3, 5, dtype=np.int32)},
     f"mask: expected dtype bool (True = attend), got int32{_REMEDY}"),
    ({"mask": array(3, 5)}, f"mask: expected dtype bool (True = attend), got float32{_REMEDY}"),
    ({"bias": array(3, 5, dtype=bool)},
     "bias: expected a floating dtype, got bool; a mask is passed as mask="),
    ({"bias": array(3, 5, dtype=np.int8)},
     "bias: expected a floating dtype, got int8; pass float32"),
    *(
        ({"bias": array(*shape)},
         "bias: expected a shape that broadcasts to [batch, heads, queries, keys] [2, 4, 3, 5], "
         f"got {list(shape)}")
        for shape in ((3, 4, 3, 5), (2, 2, 3, 5), (4, 3), (5, 3), (2,), (1, 2, 4, 3, 5), (0,))
    ),
    ({"mask": array(2, 4, 1, 3, 5, dtype=bool)},
     "mask: expected a shape that broadcasts to [batch, heads, queries, keys] [2, 4, 3, 5], "
     "got [2, 4, 1, 3, 5]"),
    # lengths
    ({"query_seq_lengths": [1.0, 2.0]},
     "query_seq_lengths: expected an integer dtype, got float32; pass whole numbers as int32"),
    ({"key_value_seq_lengths": [True, False]},
     "key_value_seq_lengths: expected an integer dtype, got bool"),
    ({"query_seq_lengths": [1, 2, 3]},
     "query_seq_lengths: expected the batch dims [2], got [3]"),
    ({"key_value_seq_lengths": 4}, "key_value_seq_lengths: expected the batch dims [2], got []"),
    ({"key_value_seq_lengths": array(2, 5, dtype=int)},
     "key_value_seq_lengths: expected the batch dims [2], got [2, 5]; of a mask that is 1 before "
     "the padding, pass its sum over the last axis"),
    ({"key_value_seq_lengths": [[4, 4]]},
     "key_value_seq_lengths: expected the batch dims [2], got [1, 2]"),
    # segment ids
    ({"query_segment_ids": array(2, 3), "key_value_segment_ids": array(2, 5, dtype=int)},
     "query_segment_ids: expected an integer dtype, got float32; pass whole numbers as int32"),
    ({"query_segment_ids": array(2, 5, dtype=int), "key_value_segment_ids": array(2, 5, dtype=int)},
     "query_segment_ids: expected shape [2, 3], got [2, 5]"),
    ({"query_segment_ids": array(2, 3, dtype=int), "key_value_segment_ids": array(5, dtype=int)},
     "key_value_segment_ids: expected shape [2, 5], got [5]"),
    ({"query_segment_ids": array(2, 3, dtype=int)},
     "segment ids: expected both query_segment_ids and key_value_segment_ids where query and key "
     "differ in length (3 and 5), got only query_segment_ids"),
    ({"key_value_segment_ids": array(2, 5, dtype=int)},
     "segment ids: expected both query_segment_ids and key_value_segment_ids where query and key "
     "differ in length (3 and 5), got only key_value_segment_ids"),
    ({"max_segments": 2**27 + 1, "query_segment_ids": array(2, 3, dtype=int),
      "key_value_segment_ids": array(2, 5, dtype=int)},
     "max_segments: expected at most 134,217,728, got 134,217,729"),
    ({"max_segments": 3},
     "max_segments: expected query_segment_ids or key_value_segment_ids with max_segments=3, got "
     "neither"),
    *(
        ({"max_segments": number}, f"max_segments: expected a static positive int, got {number!r}")
        for number in (0, -1, 2.0, True, "many")
    ),
    # per head
    ({"alibi_slopes": array(4, dtype=int)},
     "alibi_slopes: expected a floating dtype, got int32; pass float32"),
    ({"alibi_slopes": array(2)}, "alibi_slopes: expected shape [4] or [2, 4], got [2]"),
    ({"alibi_slopes": array(1, 4)}, "alibi_slopes: expected shape [4] or [2, 4], got [1, 4]"),
    ({"sinks": array(2, 2)}, "sinks: expected shape [4] or [2, 4], got [2, 2]"),
    ({"sinks": array()}, "sinks: expected shape [4] or [2, 4], got []"),
    ({"sinks": array(4, dtype=bool)}, "sinks: expected a floating dtype, got bool; pass float32"),
    # dropout
    ({"dropout_rate": 0.1},
     "dropout_key: expected a JAX PRNG key with dropout_rate=0.1, got None; pass "
     "jax.random.key(step), another one in each step and layer"),
    ({"dropout_rate": 1.0, "dropout_key": KEY}, "dropout_rate: expected 0 <= rate < 1, got 1.0"),
    ({"dropout_rate": -0.1}, "dropout_rate: expected 0 <= rate < 1, got -0.1"),
    ({"dropout_rate": float("nan")}, "dropout_rate: expected 0 <= rate < 1, got nan"),
    ({"dropout_rate": None}, "dropout_rate: expected a static number, got NoneType"),
    ({"dropout_rate": "half"}, "dropout_rate: expected a static number, got str"),
    ({"dropout_rate": 0.1, "dropout_key": 7},
     "dropout_key: expected a single JAX PRNG key, got int32[]; from a seed, such as a step's "
     "number, jax.random.key(seed) makes one"),
    ({"dropout_rate": 0.1, "dropout_key": array(2)},
     "dropout_key: expected a single JAX PRNG key, got float32[2]"),
    ({"dropout_rate": 0.1, "dropout_key": array(3, 2, dtype=np.uint32)},
     "dropout_key: expected a single JAX PRNG key, got uint32[3, 2]"),
    ({"dropout_rate": 0.1, "dropout_key": array(3, dtype=np.uint32)},
     "dropout_key: expected the words of a key of JAX's default PRNG, got 3 words"),
    ({"dropout_rate": 0.1, "dropout_key": jax.random.split(KEY, 3)},
     "dropout_key: expected a single key, got keys of shape (3,); pass one of them: it draws "
     "another mask for each batch row and head"),
    # numbers
    ({"scale": float("nan")}, "scale: expected a finite number, got nan"),
    ({"scale": float("inf")}, "scale: expected a finite number, got inf"),
    ({"scale": "big"}, "scale: expected a number or a floating array [] or [N], got str"),
    ({"scale": np.zeros(2)}, "scale: expected a number, or an array of shape [] or [4] "
     "(one for each head), got [2]"),
    ({"logits_soft_cap": 0.0}, "logits_soft_cap: expected a positive number or None, got 0.0"),
    ({"logits_soft_cap": -2}, "logits_soft_cap: expected a positive number or None, got -2.0"),
    ({"logits_soft_cap": float("inf")},
     "logits_soft_cap: expected a positive number or None, got inf"),
    ({"logits_soft_cap": [1.0]}, "logits_soft_cap: expected a static number, got list"),
    *(
        ({"local_window_size": window},
         "local_window_size: expected a non-negative int or a pair (left, right) of non-negative "
         "ints or None (also int arrays []), both ends included, with None, not -1, on an open "
         f"side, got {window!r}")
        for window in (-1, (1, -1), (1,), (1, 2, 3), (), 1.5, (1, 2.0), "ab", (None, "1"), True)
    ),
    # choices
    ({"is_causal": 1}, "is_causal: expected True or False, got 1; pass True"),
    ({"is_causal": None}, "is_causal: expected True or False, got None"),
    ({"scale": 1e39}, f"scale: {_EXPECTED_NORMAL}1e+39"),
    ({"scale": -1e-40}, f"scale: {_EXPECTED_NORMAL}-1e-40"),
    ({"scale": "0.5"}, "scale: expected a number or a floating array [] or [N], got str"),
    ({"scale": True}, "scale: expected a number or a floating array [] or [N], got bool"),
    ({"logits_soft_cap": 1e300}, f"logits_soft_cap: {_EXPECTED_NORMAL}1e+300"),
    (
        {"deterministic_backward": "yes"},
        "deterministic_backward: expected True or False, got 'yes'",
    ),
    ({"return_residual": 1}, "return_residual: expected True or False, got 1; pass True"),
    ({"return_max_logits": 1}, "return_max_logits: expected True or False, got 1; pass True"),
    ({"return_lse": "lse"}, "return_lse: expected True or False, got 'lse'"),
    *(
        ({"causal_alignment": alignment},
         "causal_alignment: expected one of ('top_left', 'bottom_right'), or the offset as an int "
         f"or an integer array, got {alignment!r}{hint}")
        for alignment, hint in (
            ("", ""), (False, ""), ("bottom_left", ""), ("top_right", ""),
            *((x, "; did you mean 'bottom_right'?")
              for x in ("bottom", "botom_right", "bottom-right", "lower_right")),
        )
    ),
    ({"score_mod": 3}, "score_mod: expected a function or None, got 3"),
    *(
        ({"implementation": wanted},
         "implementation: expected None, one of ('cudnn', 'flash', 'fa4', 'aiter', 'xla'), or a "
         f"list of them in order of preference; got {wanted!r}{hint}")
        for wanted, hint in (
            ("", ""), ([], ""), (3, ""), ([None], ""), ("nothing", ""),
            ("cuddn", "; did you mean 'cudnn'?"), ("CuDNN", "; did you mean 'cudnn'?"),
            (["xla", "cuda"], "; did you mean 'cudnn'?"), ("fa3", "; did you mean 'flash'?"),
            ("flash_attention", "; did you mean 'flash'?"), ("ck", "; did you mean 'aiter'?"),
            ("cudnn,xla", "; pass several as a list"),
            ("pallas", "; no kernel in Pallas is among them: None takes the best available"),
        )
    ),
)  # fmt: skip


def _case_id(case: Any) -> str | None:
    if not isinstance(case, dict):
        return None
    name, value = next(iter(case.items()))
    shape = getattr(value, "shape", None)
    return f"{name}-{value!r}" if shape is None else f"{name}-{value.dtype}{list(shape)}"


@pytest.mark.parametrize(("change", "message"), _WRONG_CALLS, ids=_case_id)
def test_wrong_call_raises_with_expected_and_given(change: dict[str, Any], message: str):
    call: dict[str, Any] = {"query": Q, "key": KV, "value": KV} | change
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dot_product_attention(**call)


def test_base_call_without_a_change_is_accepted():
    assert dot_product_attention(Q, KV, KV).shape == (2, 3, 4, 8)


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_mask_shape_error_names_all_batch_dims(name: str):
    q, kv = array(2, 3, 4, 2, 8), array(2, 3, 6, 2, 8)
    wrong = array(2, 2, 4, 6, dtype=bool if name == "mask" else np.float32)
    message = (
        f"{name}: expected a shape that broadcasts to [batch, heads, queries, keys] "
        "[2, 3, 2, 4, 6], got [2, 2, 4, 6]"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        dot_product_attention(q, kv, kv, **{name: wrong})


_STATIC_ARGUMENTS = {
    "is_causal": (True, "is_causal: expected True or False"),
    "deterministic_backward": (True, "deterministic_backward: expected True or False"),
    "return_lse": (True, "return_lse: expected True or False"),
    "return_residual": (True, "return_residual: expected True or False"),
    "return_max_logits": (True, "return_max_logits: expected True or False"),
    "max_segments": (2, "max_segments: expected a static positive int"),
    "local_window_size": (2.0, "local_window_size: expected a non-negative int or a pair"),
    "logits_soft_cap": (3.0, "logits_soft_cap: expected a static number"),
    "dropout_rate": (0.0, "dropout_rate: expected a static number"),
    "implementation": (1, "implementation: expected None, one of"),
}


@pytest.mark.parametrize("name", _STATIC_ARGUMENTS)
def test_tracer_as_static_argument_raises(name: str):
    value, message = _STATIC_ARGUMENTS[name]
    call = jax.jit(lambda x: dot_product_attention(Q, KV, KV, **{name: x}))
    with pytest.raises(ValueError, match=re.escape(message) + ".*got a traced .*static_argnames"):
        call(value)


def test_wrong_call_raises_under_jit_and_in_explain():
    message = re.escape("key: expected query's head dim 8, got 7")
    wrong = array(2, 5, 2, 7)
    with pytest.raises(ValueError, match=message):
        jax.jit(dot_product_attention)(Q, wrong, KV)
    with pytest.raises(ValueError, match=message):
        explain(Q, jax.ShapeDtypeStruct(wrong.shape, wrong.dtype), KV)


def test_unknown_argument_raises_type_error():
    with pytest.raises(TypeError, match="causal"):
        dot_product_attention(Q, KV, KV, causal=True)  # pyright: ignore
    with pytest.raises(TypeError, match="causal"):
        explain(Q, KV, KV, causal=True)
