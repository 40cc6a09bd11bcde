"""Names, shapes and masks as other libraries write them: the message gives the form used here."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import (
    AttentionConventionWarning,
    assert_kernels,
    dot_product_attention,
    dropout_mask,
    explain,
    paged_attention,
    ragged_dot_product_attention,
)
from attn_dispatch.call import foreign_names

X = np.random.default_rng(0).standard_normal((2, 4, 2, 8), np.float32)
CALLS = (dot_product_attention, ragged_dot_product_attention, paged_attention)


def error(message: str, call: Any = dot_product_attention, **arguments: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        call(X, X, X, **arguments)


def test_foreign_name_gets_the_name_used_here():
    error("dot_product_attention() got an unexpected keyword argument 'softmax_scale': here it is "
          "scale", softmax_scale=0.5)  # fmt: skip
    error("'use_causal_mask': here it is is_causal; 'dropout_rng': here it is dropout_key",
          use_causal_mask=True, dropout_rng=None)  # fmt: skip
    error("'causal': here it is is_causal; flash-attn's alignment is causal_alignment=",
          causal=True)  # fmt: skip
    error("'segment_ids': here it is query_segment_ids and key_value_segment_ids, ids from 1 on, 0 "
          "is padding", segment_ids=np.ones((2, 4), int))  # fmt: skip
    error("'precision': here it has no counterpart: jax.default_matmul_precision", precision=None)
    error("'cu_seqlens': ragged_dot_product_attention takes cu_seqlens_q and", cu_seqlens=[0, 4])
    error("'key_padding_mask': here it is key_value_seq_lengths: the numbers of keys [batch], or "
          "mask=~key_padding_mask[:, None, None, :]", key_padding_mask=None)  # fmt: skip
    error("'context_lens': here it is key_value_seq_lengths: the numbers of keys [batch]",
          paged_attention, context_lens=[4, 4])  # fmt: skip
    with pytest.raises(TypeError, match="'q': here it is query; 'k': here it is key; 'v'"):
        dot_product_attention(q=X, k=X, v=X)  # pyright: ignore


def test_foreign_window_names_get_a_hint():
    error("'window_size': here it is local_window_size, both ends included; an open side is None, "
          "not -1; flash-attn's alignment is causal_alignment=\"bottom_right\"; "
          "(-1, -1) means no window: leave the argument out", window_size=(-1, -1))  # fmt: skip
    with pytest.raises(TypeError) as raised:
        dot_product_attention(X, X, X, window=(3, 0))  # pyright: ignore
    assert str(raised.value).endswith("an open side is None, not -1")


@pytest.mark.parametrize("layout", ["thd_thd_thd", "thd", "t3hd"])
def test_packed_layouts_get_a_hint(layout: str):
    with pytest.raises(ValueError, match="packed sequences have segment ids with max_segments, or"):
        dot_product_attention(X, X, X, qkv_layout=layout)  # pyright: ignore


@pytest.mark.parametrize("name", ["mosaic", "triton", ["xla_chunked", "xla"]])
def test_tokamax_implementations_get_a_hint(name: Any):
    with pytest.raises(ValueError, match="; tokamax's are not among them: None takes the best"):
        dot_product_attention(X, X, X, implementation=name)


def test_every_public_call_gives_hints():
    hint = "'sm_scale': here it is scale"
    for call in (*CALLS, explain, dropout_mask):
        error(hint, call, sm_scale=0.5)
    cu = np.array([0, 4])
    arguments: dict[str, Any] = {
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu,
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    error("'cu_seqlens_k': here it is cu_seqlens_kv", ragged_dot_product_attention, **arguments)
    error("'cu_seqlens_k': here it is cu_seqlens_kv", explain, **arguments)


def test_hint_for_an_argument_that_the_call_lacks():
    """A hint never proposes an argument that would raise a TypeError again."""
    error("'dropout_p': paged_attention has no counterpart; in dot_product_attention it is dropout",
          paged_attention, dropout_p=0.1)  # fmt: skip
    error("'attn_mask': ragged_dot_product_attention has no counterpart",
          ragged_dot_product_attention, attn_mask=None)  # fmt: skip
    with pytest.raises(TypeError) as raised:
        paged_attention(X, X, X, window_size=(-1, -1))  # pyright: ignore
    assert str(raised.value).endswith("not -1; (-1, -1) means no window: leave the argument out")
    foreign_hints = {
        call: [str(foreign_names._hint(x, None, inspect.signature(call).parameters, "it"))
               for x in foreign_names.NAMES]
        for call in CALLS
    }  # fmt: skip
    parameters = {call: {*inspect.signature(call).parameters} for call in CALLS}
    all_parameters = set().union(*parameters.values())
    for call, hints in foreign_hints.items():
        for hint in hints:
            named = all_parameters & {*re.findall(r"\w+", hint)}
            is_elsewhere = "has no counterpart" in hint or re.search(r"(ragged|paged)_\w+", hint)
            assert not named or named & parameters[call] or is_elsewhere, (call, hint)


def test_hints_that_differ_for_pages_and_for_programs():
    error("'seq_lens': here it is key_value_seq_lengths: the numbers of keys", paged_attention,
          seq_lens=[4, 4])  # fmt: skip
    error("'seq_lens': here it is query_seq_lengths and key_value_seq_lengths", seq_lens=[4, 4])
    error("'mask_mod': here it has no counterpart: return -jnp.inf from a score_mod",
          paged_attention, mask_mod=None)  # fmt: skip
    error("'kv_lens': here it is key_value_seq_lengths", kv_lens=[4, 4])
    error("'target': here it has no counterpart: make the call in the block `with attn_dispatch.ta",
          target="h100")  # fmt: skip
    for wrong, right in (("implementation", "implementations"), ("allow_other", "allow_others")):
        error(f"'{wrong}'; did you mean '{right}'?", assert_kernels, **{wrong: True})


def test_unknown_name_is_reported_or_corrected():
    error("got an unexpected keyword argument 'wibble'", wibble=1)
    error("'local_windows_size'; did you mean 'local_window_size'?", local_windows_size=1)


def test_hints_use_only_names_that_exist():
    """Every name in a hint exists, and no foreign name is a parameter of dot_product_attention."""
    parameters = {x for call in CALLS for x in inspect.signature(call).parameters}
    for name, hint in foreign_names.NAMES.items():
        assert name not in inspect.signature(dot_product_attention).parameters, name
        assert hint.startswith(("is ", "has ", "ragged_", "arrays are")), name
        for word in re.findall(r"\b\w+_\w+\b", hint):
            known = parameters | {name} | set(dir(attn_dispatch)) | {"bottom_right"}
            known |= {"attn_dispatch", "attention_fn", "default_matmul_precision"}
            assert word in known, (name, word)


def test_public_signatures_hide_no_parameters():
    for call in CALLS:
        kinds = {x.kind for x in inspect.signature(call).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        assert call.__doc__ and call.__name__ in attn_dispatch.__all__  # pyright: ignore[reportAttributeAccessIssue]


def test_swapped_heads_and_length_get_a_hint():
    q, kv = np.zeros((2, 8, 100, 16), np.float32), np.zeros((2, 8, 30, 16), np.float32)
    hint = '; these look swapped: for [batch, heads, length, dim] pass qkv_layout="BNTH"'
    for kv_heads in (8, 4, 1):
        with pytest.raises(ValueError, match=re.escape(hint)):
            dot_product_attention(q, kv[:, :kv_heads], kv[:, :kv_heads])
    for name, x in (
        ("mask", np.ones((2, 8, 100, 100), bool)),
        ("bias", np.zeros((1, 1, 100, 100))),
    ):
        with pytest.raises(ValueError, match=re.escape(hint)):
            dot_product_attention(q, q, q, **{name: x})
    dot_product_attention(q, kv, kv, qkv_layout="BNTH")
    with pytest.raises(ValueError, match=r"for .batch, length, heads, dim. leave out qkv_layout"):
        dot_product_attention(*(x.swapaxes(1, 2) for x in (q, kv, kv)), qkv_layout="BNTH")
    with pytest.raises(ValueError) as raised:  # fits neither layout
        dot_product_attention(q, q, q, mask=np.ones((2, 8, 7, 100), bool))
    assert "look like" not in str(raised.value)
    with pytest.raises(ValueError) as raised:
        dot_product_attention(X[:, :3, :1], kv[..., :8], kv[..., :8])
    assert "look like" not in str(raised.value)
    # These do not look swapped: 512 would be too many heads.
    twelve, five = (jnp.zeros((2, 512, n, 16)) for n in (12, 5))
    with pytest.raises(ValueError, match=r"multiple of key's 5, got 12 \(arrays are .*\)$"):
        dot_product_attention(twelve, five, five)


def warned(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        call()
    assert all(x.category is AttentionConventionWarning for x in given)
    assert all(x.filename == __file__ for x in given)
    return [str(x.message) for x in given]


LONG = np.random.default_rng(1).standard_normal((2, 160, 2, 8), np.float32)
SHORT = LONG[:, :128]
TRI = np.tri(160, dtype=bool)


@pytest.mark.parametrize(
    ("mask", "argument"),
    [
        (TRI, "is_causal=True,"),
        (np.broadcast_to(TRI, (2, 1, 160, 160)), "is_causal=True,"),
        (jnp.asarray(TRI), "is_causal=True,"),
        (np.arange(160)[None, None, None] < np.array([90, 160])[:, None, None, None],
         "key_value_seq_lengths,"),
        (np.broadcast_to(np.arange(160) < 90, (160, 160)), "key_value_seq_lengths,"),
    ],
    ids=["causal", "causal_of_batch", "jax", "lengths", "lengths_of_rows"],
)  # fmt: skip
def test_mask_that_an_argument_expresses_warns(mask: Any, argument: str):
    (message,) = warned(lambda: [dot_product_attention(LONG, LONG, LONG, mask=mask) for _ in "ab"])
    assert f"only expresses {argument}" in message
    # A constant of the program is examined too; an argument of the program is not.
    given = np.asarray(mask)
    assert warned(lambda: jax.jit(lambda: dot_product_attention(LONG, LONG, LONG, mask=given))())
    traced = jax.jit(lambda m: dot_product_attention(LONG, LONG, LONG, mask=m))
    assert warned(lambda: traced(given)) == []


def test_causal_mask_over_a_cache_warns():
    mask = np.tri(128, 160, 32, dtype=bool)
    (message,) = warned(lambda: dot_product_attention(SHORT, LONG, LONG, mask=mask))
    assert 'is_causal=True with causal_alignment="bottom_right"' in message


@pytest.mark.parametrize(
    "mask",
    [
        np.tri(160, k=1, dtype=bool),
        np.tri(160, k=-1, dtype=bool) | (np.arange(160) == 0),
        TRI & (np.arange(160) != 5),
        np.stack([TRI, TRI.T | TRI])[:, None],
        np.broadcast_to(np.arange(160) >= 90, (160, 160)),
        np.ones((160, 160), bool),
        np.zeros((160, 160), bool),
        (np.arange(160) < np.array([90, 160])[:, None])[None, :, None],
    ],
    ids=["one_more", "one_less", "hole", "one_of_two", "ends", "all", "none", "of_heads"],
)
def test_mask_that_no_argument_expresses_does_not_warn(mask: np.ndarray):
    assert warned(lambda: dot_product_attention(LONG, LONG, LONG, mask=mask)) == []


def test_small_mask_or_mask_with_segments_does_not_warn():
    small = np.tri(100, dtype=bool)
    short = LONG[:, :100]
    assert warned(lambda: dot_product_attention(short, short, short, mask=small)) == []
    ids = np.ones((2, 160), int)
    options: dict[str, Any] = {"mask": TRI, "query_segment_ids": ids}
    assert warned(lambda: dot_product_attention(LONG, LONG, LONG, **options)) == []
    large = np.broadcast_to(TRI, (64, 2, 160, 160))
    struct = jax.ShapeDtypeStruct((64, 160, 2, 8), jnp.float32)
    assert warned(lambda: explain(struct, struct, struct, mask=large)) == []
