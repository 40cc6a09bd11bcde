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
    dot_product_attention,
    explain,
    paged_attention,
    ragged_dot_product_attention,
)
from attn_dispatch.call import foreign_names

X = np.random.default_rng(0).standard_normal((2, 4, 2, 8), np.float32)
CALLS = (dot_product_attention, ragged_dot_product_attention, paged_attention)


def test_hint_for_an_argument_that_the_call_lacks():
    """A hint never proposes an argument that would raise a TypeError again."""
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
    with pytest.raises(
        ValueError, match=r"multiple of 5, the heads of key, got 12 \(arrays are .*\)$"
    ):
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
