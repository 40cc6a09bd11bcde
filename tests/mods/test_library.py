"""attn_dispatch.mods against attention that is written out, and against the papers' definitions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, mods
from attn_dispatch.programs.tracing import trace
from tests.support.repository import DOCS

B, T, S, N, K, H = 2, 9, 13, 4, 2, 8
_rng = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(_rng.standard_normal(shape), jnp.float32)


Q, KEY, V, OUT_GRAD = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H), normal(B, S, N, H)
SLOPES, TABLE = jnp.asarray(_rng.random(N), jnp.float32), normal(8, N)
t, s = np.arange(T)[:, None], np.arange(S)


def written_out(q: Any, k: Any, v: Any, score_of: Any = None, mask: Any = True) -> jax.Array:
    """All scores at once; score_of(scores [B, N, T, S]), mask [T, S] or [B, 1, T, S]."""
    batch, rows, keys = q.shape[0], q.shape[1], k.shape[1]
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    scores = scores if score_of is None else score_of(scores)
    mask = jnp.broadcast_to(mask, (batch, N, rows, keys))
    p = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    p = jnp.where(mask, p, 0)  # also where a row attends nothing
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def assert_same(ours: Callable[..., Any], plain: Callable[..., Any], *arrays: Any) -> None:
    """Values, and the gradients of all arrays."""

    def both(call: Callable[..., Any]) -> Any:
        def loss(*arrays: Any) -> tuple[jax.Array, jax.Array]:
            out = call(*arrays)
            return (out * OUT_GRAD[:, : out.shape[1]]).sum(), out

        return jax.value_and_grad(loss, tuple(range(len(arrays))), has_aux=True)(*arrays)

    got, expected = jax.jit(lambda: both(ours))(), jax.jit(lambda: both(plain))()
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def assert_masks(mask_mod: Any, mask: Any, q: Any = Q, k: Any = KEY, v: Any = V) -> None:
    mask = np.asarray(mask)
    assert 0 < mask.mean() < 1
    assert_same(
        lambda *x: dot_product_attention(*x, mask_mod=mask_mod),
        lambda *x: written_out(*x, mask=mask),
        q, k, v,
    )  # fmt: skip


def pairs(mask_mod: Any, rows: int = T, keys: int = S) -> np.ndarray:
    """What a mask says, [rows, keys], asked for one pair at a time."""
    of_row = jax.vmap(mask_mod, (None, None, None, 0))
    of_all = jax.jit(jax.vmap(of_row, (None, None, 0, None)))
    zero = jnp.int32(0)
    return np.asarray(of_all(zero, zero, *(jnp.arange(x, dtype=jnp.int32) for x in (rows, keys))))


def test_soft_cap():
    assert_same(
        lambda q, k, v: dot_product_attention(q, k, v, score_mod=mods.soft_cap(1.5)),
        lambda q, k, v: written_out(q, k, v, lambda x: 1.5 * jnp.tanh(x / 1.5)),
        Q, KEY, V,
    )  # fmt: skip
    cap = dot_product_attention(Q, KEY, V, score_mod=mods.soft_cap(2))
    np.testing.assert_allclose(cap, dot_product_attention(Q, KEY, V, logits_soft_cap=2), atol=1e-6)


def test_alibi():
    assert_same(
        lambda q, k, v, slopes: dot_product_attention(q, k, v, score_mod=mods.alibi(slopes)),
        lambda q, k, v, slopes: written_out(
            q, k, v, lambda x: x - slopes[:, None, None] * np.abs(t - s)
        ),
        Q, KEY, V, SLOPES,
    )  # fmt: skip


def test_alibi_keeps_long_distances_in_16_bits():
    slopes = jnp.ones(1, jnp.bfloat16)
    score = mods.alibi(slopes)(jnp.float32(0), 0, 0, jnp.int32(0), jnp.int32(1001))
    assert score == -1001


# First distance of each bucket, by hand: half hold one distance each, the others begin at the whole
# number that is not below exact · (max_distance / exact)^(i / wide).
# 32, both directions: 16 each, 8 exact, 8 · 16^(i/8) = 8, 11.3, 16, 22.6, 32, 45.3, 64, 90.5.
# 32, one: 16 exact, 16 · 8^(i/16) = 16, 18.2, 20.7, 23.6, 26.9, 30.6, 34.9, 39.7, 45.3, 51.5, 58.7,
#   66.8, 76.1, 86.7, 98.7, 112.4.
# 8, one, max_distance 64: 4 exact, 4 · 16^(i/4) = 4, 8, 16, 32.
BUCKETS: dict[str, tuple[int, dict[str, Any], tuple[int, ...]]] = {
    "encoder": (32, {}, (*range(8), 8, 12, 16, 23, 32, 46, 64, 91)),
    "decoder": (
        32,
        {"bidirectional": False},
        (*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113),
    ),
    "borders that are whole": (
        8, {"bidirectional": False, "max_distance": 64}, (0, 1, 2, 3, 4, 8, 16, 32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUCKETS)
def test_t5_buckets(name: str):
    num_buckets, options, first = BUCKETS[name]
    numbers = jnp.arange(num_buckets, dtype=jnp.float32)[:, None]
    mod = mods.relative_position(numbers, **options)
    before = np.arange(200)  # how far the key is before the query
    bucket_of = jax.vmap(lambda t, s: mod(jnp.float32(0), 0, 0, t, s))
    expected = np.searchsorted(first, before, side="right") - 1
    np.testing.assert_array_equal(bucket_of(200 + 0 * before, 200 - before), expected)
    after = np.asarray(bucket_of(200 + 0 * before, 200 + before))
    if options.get("bidirectional", True):
        np.testing.assert_array_equal(after[1:], num_buckets // 2 + expected[1:])
    else:
        np.testing.assert_array_equal(after, 0)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_position(bidirectional: bool):
    # 8 buckets up to distance 6; both directions: 2 exact, then 2 · 3^(1/2) = 3.5; one: 4, and
    # 4 · 1.5^(i/4) = 4.4, 4.9, 5.4.
    of_distance = [0, 1, 2, 2] + [3] * 9 if bidirectional else [0, 1, 2, 3, 4, 6] + [7] * 7
    if bidirectional:
        buckets = np.array(of_distance)[np.abs(t - s)] + 4 * (s > t)
    else:
        buckets = np.array(of_distance)[np.maximum(t - s, 0)]
    options: dict[str, Any] = {"bidirectional": bidirectional, "max_distance": 6}

    def ours(q: Any, k: Any, v: Any, table: Any) -> jax.Array:
        mod = mods.relative_position(table, **options)
        return dot_product_attention(q, k, v, score_mod=mod)

    def plain(q: Any, k: Any, v: Any, table: Any) -> jax.Array:
        return written_out(q, k, v, lambda x: x + jnp.moveaxis(table[buckets], -1, 0))

    assert_same(ours, plain, Q, KEY, V, TABLE)


def test_prefix_lm():
    lengths = np.array([3, 0])
    mask = (s <= t) | (s < lengths[:, None, None, None])
    assert_masks(mods.prefix_lm(lengths), mask)


def test_document_mask():
    """In any order, with numbers of any sign; a query whose document has no key attends nothing."""
    queries, keys = (_rng.integers(-1, 3, (B, x)) for x in (T, S))
    queries[0, 4] = 9
    mask = queries[:, None, :, None] == keys[:, None, None, :]
    assert_masks(mods.document_mask(queries, keys), mask)
    mask = keys[:, None, :, None] == keys[:, None, None, :]
    assert_masks(mods.document_mask(keys), mask, q=normal(B, S, N, H))


@pytest.mark.parametrize(("left", "dilation"), [(6, 3), (5, 2), (0, 1), (4, 1)])
def test_dilated_window(left: int, dilation: int):
    seen = [[j in range(i, max(i - left, 0) - 1, -dilation) for j in range(S)] for i in range(T)]
    assert_masks(mods.dilated_window(left, dilation), seen)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunked_window(chunk: int):
    assert_masks(mods.chunked_window(chunk), (s <= t) & (t // chunk == s // chunk))


PARENTS = np.array([-1, 0, 0, 1, 2, -1, 5, 1, 4])
"""The parents of T tokens: two trees behind the cache."""


def seen_in_tree(parents: Any, cache: int) -> np.ndarray:
    """By going up from each token; bool [T, S]."""
    mask = np.zeros((len(parents), S), bool)
    mask[:, :cache] = True
    for token in range(len(parents)):
        up = token
        while up >= 0:
            mask[token, cache + up] = True
            up = int(parents[up])
    return mask


@pytest.mark.parametrize("cache", [0, 2, 4])
def test_tree_mask(cache: int):
    """With cache 2, two keys come after the tree, and no token attends to them."""
    assert_masks(mods.tree_mask(PARENTS, cache), seen_in_tree(PARENTS, cache))


def test_tree_mask_of_each_row():
    """Traced trees and cache lengths."""
    parents = np.stack([PARENTS, np.arange(T) - 1])
    caches = np.array([1, 3])
    mask = np.stack([seen_in_tree(*x) for x in zip(parents, caches, strict=True)])

    @jax.jit
    def attend(parents: Any, caches: Any) -> jax.Array:
        return dot_product_attention(Q, KEY, V, mask_mod=mods.tree_mask(parents, caches))

    out = attend(parents, caches)
    np.testing.assert_allclose(out, written_out(Q, KEY, V, mask=mask[:, None]), atol=2e-5)


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_trees_drawn(size: int):
    parents = np.array([[_rng.integers(-1, i) for i in range(size)] for _ in range(20)])
    # Values that are unit vectors make the output the probabilities.
    q, k = jnp.zeros((20, size, 1, 1)), jnp.zeros((20, S, 1, 1))
    v = jnp.broadcast_to(jnp.eye(S)[:, None], (20, S, 1, S))
    seen = dot_product_attention(q, k, v, mask_mod=mods.tree_mask(parents))[:, :, 0] > 0
    np.testing.assert_array_equal(seen, [seen_in_tree(x, 0) for x in parents])


@pytest.mark.parametrize(("height", "width", "radius"), [(5, 7, 1), (5, 6, 2), (3, 4, 0)])
def test_neighborhood_sees_a_square_of_the_grid(height: int, width: int, radius: int):
    seen = pairs(mods.neighborhood_2d(height, width, radius), height * width, height * width)
    side = 2 * radius + 1
    for row, column in itertools.product(range(height), range(width)):
        # In the middle of the square, unless the square would go past a border.
        top = min(max(row - radius, 0), height - side)
        left = min(max(column - radius, 0), width - side)
        expected = np.zeros((height, width), bool)
        expected[top : top + side, left : left + side] = True
        np.testing.assert_array_equal(
            seen[row * width + column].reshape(height, width), expected, f"{row}, {column}"
        )
    assert (seen.sum(axis=1) == side**2).all()


def test_neighborhood():
    rows, columns = np.divmod(np.arange(12), 4)
    tops, lefts = np.clip(rows - 1, 0, 0), np.clip(columns - 1, 0, 1)  # of 3 x 3 in 3 x 4
    mask = (tops[:, None] <= rows) & (lefts[:, None] <= columns) & (columns <= lefts[:, None] + 2)
    assert_masks(mods.neighborhood_2d(3, 4, 1), mask, normal(B, 12, N, H), KEY[:, :12], V[:, :12])


def first_two(b: Any, n: Any, t: Any, s: Any) -> Any:
    return s < 2


def test_masks_combined():
    """With functions of one's own among them."""
    window = mods.dilated_window(6, 3)
    is_in_window = (s <= t) & (s >= t - 6) & ((t - s) % 3 == 0)
    even_heads = lambda b, n, t, s: n % 2 == 0  # noqa: E731
    assert_masks(mods.any_of(window, first_two), is_in_window | (s < 2))
    assert_masks(mods.all_of(window, mods.not_(first_two)), is_in_window & (s >= 2))
    is_even = np.arange(N)[:, None, None] % 2 == 0
    assert_masks(
        mods.any_of(mods.all_of(window, even_heads), first_two, mods.not_(even_heads)),
        np.broadcast_to((is_in_window & is_even) | (s < 2) | ~is_even, (B, N, T, S)),
    )


def test_a_bool_of_python_is_a_mask_too():
    always = lambda b, n, t, s: True  # noqa: E731
    with_it = mods.all_of(always, mods.any_of(mods.not_(always), mods.chunked_window(4)))
    np.testing.assert_array_equal(pairs(with_it), pairs(mods.chunked_window(4)))


def test_score_and_mask_together():
    lengths = np.array([3, 5])

    def ours(q: Any, k: Any, v: Any, slopes: Any) -> jax.Array:
        return dot_product_attention(
            q, k, v, score_mod=mods.alibi(slopes), mask_mod=mods.prefix_lm(lengths)
        )

    mask = (s <= t) | (s < lengths[:, None, None, None])
    assert_same(
        ours,
        lambda q, k, v, slopes: written_out(
            q, k, v, lambda x: x - slopes[:, None, None] * np.abs(t - s), mask
        ),
        Q, KEY, V, SLOPES,
    )  # fmt: skip


@pytest.mark.parametrize("offset", [4, (4, 1), np.array(2)], ids=["int", "rows", "array"])
def test_queries_behind_a_cache(offset: Any):
    if isinstance(offset, tuple):
        offset = np.array(offset)
    at = t + np.reshape(offset, (-1, 1, 1, 1))
    window = mods.with_query_offset(mods.chunked_window(6), offset)
    assert_masks(window, (s <= at) & (at // 6 == s // 6))

    def ours(q: Any, k: Any, v: Any, slopes: Any) -> jax.Array:
        moved = mods.with_query_offset(mods.alibi(slopes), offset)
        return dot_product_attention(q, k, v, score_mod=moved)

    def plain(q: Any, k: Any, v: Any, slopes: Any) -> jax.Array:
        return written_out(q, k, v, lambda x: x - slopes[:, None, None] * np.abs(at - s))

    assert_same(ours, plain, Q, KEY, V, SLOPES)


def test_vmap_over_what_a_mod_is_made_with():
    tables = jnp.stack([TABLE, 2 * TABLE, -TABLE])

    def grad(table: Any) -> jax.Array:
        def loss(table: Any) -> jax.Array:
            mod = mods.relative_position(table, max_distance=6)
            return (dot_product_attention(Q, KEY, V, score_mod=mod) * OUT_GRAD[:, :T]).sum()

        return jax.grad(loss)(table)

    got = jax.jit(jax.vmap(grad))(tables)
    np.testing.assert_allclose(got, [grad(x) for x in tables], rtol=2e-5, atol=2e-5)


MADE: dict[str, Callable[[], Any]] = {
    "soft_cap": lambda: mods.soft_cap(2),
    "alibi": lambda: mods.alibi(SLOPES),
    "relative_position": lambda: mods.relative_position(TABLE),
    "prefix_lm": lambda: mods.prefix_lm(np.arange(B)),
    "document_mask": lambda: mods.document_mask(np.ones((B, T), int)),
    "dilated_window": lambda: mods.dilated_window(6, 3),
    "chunked_window": lambda: mods.chunked_window(4),
    "neighborhood_2d": lambda: mods.neighborhood_2d(3, 3, 1),
    "tree_mask": lambda: mods.tree_mask(PARENTS, np.arange(B)),
    "all_of": lambda: mods.all_of(mods.chunked_window(4), first_two),
    "any_of": lambda: mods.any_of(mods.chunked_window(4), first_two),
    "not_": lambda: mods.not_(first_two),
    "with_query_offset": lambda: mods.with_query_offset(mods.alibi(SLOPES), 3),
}


OF_SCORES = {"soft_cap", "alibi", "relative_position", "with_query_offset"}


def test_mods_made_alike_are_one_program():
    """A call with one that is made anew each time is compiled once."""
    assert MADE.keys() == set(mods.__all__)
    for name, made in MADE.items():
        kind = "score_mod" if name in OF_SCORES else "mask_mod"
        first, second = (trace(kind, made(), (), "float32").program for _ in range(2))
        assert first == second and hash(first) == hash(second), name


@pytest.mark.parametrize("name", MADE)
def test_x64(name: str):
    """Indices stay int32 there, what a user makes is int64, and the score may be either float."""

    def results(dtype: Any) -> np.ndarray:
        mod = MADE[name]()
        if name not in OF_SCORES:
            return pairs(mod, T, T)
        return pairs(lambda b, n, t, s: mod(jnp.asarray(0.5, dtype), b, n, t, s), T, T)

    narrow = results(jnp.float32)
    with jax.enable_x64(True):
        wide = results(jnp.float64)
    assert wide.dtype == (np.float64 if name in OF_SCORES else bool)
    np.testing.assert_allclose(narrow, wide, rtol=1e-6)


_MASK = mods.chunked_window(4)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (mods.soft_cap, (0,), "cap: expected a finite number above 0, got 0.0"),
        (mods.soft_cap, (np.inf,), "cap: expected a finite number above 0, got inf"),
        (mods.soft_cap, (SLOPES,), "cap: expected a static number, got Array"),
        (mods.alibi, (SLOPES[None],), r"slopes: expected an array \[N\] of floating dtype, got f"),
        (mods.alibi, ([1, 2],), r"of floating dtype, got int32\[2\]"),
        (mods.relative_position, (SLOPES,), r"table: expected an array \[num_buckets, N\]"),
        (mods.relative_position, (TABLE[:7],), "an even number of buckets from 4 on, got 7"),
        (mods.relative_position, (TABLE[:2],), "an even number of buckets from 4 on, got 2"),
        (
            mods.prefix_lm,
            (3,),
            r"prefix_lengths: expected an array \[B\] of integer dtype, got int",
        ),
        (mods.prefix_lm, (SLOPES,), r"of integer dtype, got float32\[4\]"),
        (mods.document_mask, ([1, 1],), r"query_documents: expected an array \[B, T\]"),
        (mods.document_mask, ([[1]], [1]), r"key_documents: expected an array \[B, S\]"),
        (mods.document_mask, ([[1], [2]], [[1]]), "key_documents: expected 2 batch rows, .* got 1"),
        (mods.dilated_window, (-1, 2), "left: expected a static int from 0 on, got -1"),
        (mods.dilated_window, (3, 0), "dilation: expected a static int from 1 on, got 0"),
        (mods.chunked_window, (2.5,), "chunk: expected a static int from 1 on, got 2.5"),
        (mods.chunked_window, (True,), "chunk: expected a static int from 1 on, got True"),
        (mods.chunked_window, (2**31,), "chunk: expected a static int below 2.31, got 2147483648"),
        (mods.neighborhood_2d, (0, 3, 1), "height: expected a static int from 1 on, got 0"),
        (mods.neighborhood_2d, (5, 4, 2), "a square of 5 x 5 that fits the grid, got 5 x 4"),
        (mods.tree_mask, ([[[0]]],), r"parents: expected an array \[T\] or \[B, T\] of integer"),
        (mods.tree_mask, ([-1, 1],), "-1 or an earlier token for each token, got 1 for token 1"),
        (mods.tree_mask, ([-1, 0, -2],), "got -2 for token 2"),
        (mods.tree_mask, ([-1], -3), "cache_length: expected a static int from 0 on, got -3"),
        (mods.tree_mask, ([-1], 2.5), r"cache_length: expected an array \[\] or \[B\] of integer"),
        (mods.all_of, (), "all_of: expected one mask or more, got none"),
        (mods.any_of, (_MASK, True), "any_of: expected functions, got True"),
        (mods.not_, (3,), "not_: expected functions, got 3"),
        (mods.not_, (mods.soft_cap(3.0),), r"of \(b, n, t, s\), got one of \(score, b, n, t, s\)"),
        (mods.soft_cap, ("3",), "cap: expected a static number, got str"),
        (mods.with_query_offset, (_MASK, -1), "offset: expected a static int from 0 on, got -1"),
        (mods.with_query_offset, (_MASK, SLOPES), r"offset: expected an array \[\] or \[B\]"),
    ],
)
def test_wrong_arguments(function: Any, arguments: Any, message: str):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize(("bidirectional", "least"), [(True, 3), (False, 5)])
def test_max_distance_is_past_what_has_a_bucket_of_its_own(bidirectional: bool, least: int):
    options: dict[str, Any] = {"bidirectional": bidirectional}
    mods.relative_position(TABLE, max_distance=least, **options)
    with pytest.raises(ValueError, match=f"static int from {least} on, got {least - 1}"):
        mods.relative_position(TABLE, max_distance=least - 1, **options)


def test_bidirectional_is_a_bool():
    wrong: Any = 32
    with pytest.raises(ValueError, match="bidirectional: expected True or False, got 32"):
        mods.relative_position(TABLE, bidirectional=wrong)


def test_traced_static_arguments_are_refused():
    for function in (mods.soft_cap, mods.chunked_window):
        with pytest.raises(ValueError, match="expected a static"):
            jax.jit(lambda x, function=function: function(x)(*[jnp.int32(0)] * 4))(3)


def test_the_page_tells_of_every_mod_and_its_code_runs(capsys):
    """docs/mods.md, from top to bottom. tests/docs/test_draw_masks.py looks at its pictures."""
    page = (DOCS / "mods.md").read_text("utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    for snippet in snippets:
        names.pop("out", None)
        exec(snippet, names)
        result = names["table_grad" if "def loss" in snippet else "out"]
        assert bool(jnp.isfinite(result).all()) and bool(result.any()), snippet
    assert "xla" in capsys.readouterr().out  # what explain prints
    code, titles = "\n".join(snippets), "\n".join(re.findall("^## .*$", page, re.MULTILINE))
    for name in mods.__all__:
        assert f"mods.{name}(" in code and f"`{name}(" in titles, name
