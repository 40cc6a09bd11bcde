"""Programs as nodes of cuDNN's graph: their results, and functions that have no nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import explain, mods
from attn_dispatch.programs.caps_and_slopes import Alibi
from attn_dispatch.programs.factor import without_factor
from attn_dispatch.programs.kernel import KernelProgram, Pairs, ScoreRules, kernel_program
from attn_dispatch.programs.nodes import HeadSlopes, NodeArray, RowKeys
from attn_dispatch.programs.tracing import trace
from attn_dispatch.reason import Reason
from attn_dispatch.semantics.mods import xla_array
from attn_dispatch.semantics.pair_indices import PairIndices
from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.drawn_masks import DrawnMaskMod
from attn_dispatch_tools.verify.drawn_mods import DrawnScoreMod, Places
from attn_dispatch_tools.verify.reference import arrays_of
from tests.support.backend import needs_cudnn
from tests.support.nodes_in_numpy import run


def with_score_mods(count: int) -> list[Case]:
    """Drawn cases with a score_mod; their other options have no effect on these tests."""
    drawn = draws.examples(12 * count, 11, draws.SMALL)
    return [
        x for x in drawn if x.score_mod and x.cu_q is None and "%" not in (x.mask_mod or ("",))[0]
    ][:count]


@pytest.mark.parametrize("case", with_score_mods(24), ids=str)
def test_nodes_compute_the_function(case: Case):
    """Sequences are shorter than the arrays, with NaN after them."""
    options, operands = case.forward_options(), case.operands()
    score_mod, mask_mod = options.meaning.score_mod, options.meaning.mask_mod
    assert isinstance(score_mod, DrawnScoreMod)
    rng, (n, t, s) = np.random.default_rng(7), (case.n, case.t, case.s)
    length = max(case.s - 1, 1)
    band = (None, 0) if case.is_causal else (None, None)
    pairs = Pairs(lengths=(t, s), band=band, has_runtime_lengths=True)
    alibi = Alibi(0, is_one_sided=case.is_causal) if case.alibi else None
    rules = ScoreRules(case.soft_cap, score_mod, alibi, mask_mod)
    kernel = kernel_program(rules, pairs, is_backward=True)
    if isinstance(kernel, Reason):
        assert kernel.rule.endswith("/array_by_s")
        kernel = kernel_program(rules, pairs, is_backward=False)
    assert isinstance(kernel, KernelProgram)
    x, g = (rng.standard_normal((1, n, t, s)) for _ in range(2))
    start = operands["mods_start"][0]
    places = Places(np.array(0), start[0], *(y[0] for y in np.ogrid[:1, :n, :t, :s][1:]))
    places = replace(places, n=places.n + start[1])
    is_inside = places.s < length
    x, g = np.where(is_inside, x, np.nan), np.where(is_inside, g, 0)
    attends = np.broadcast_to(
        is_inside & (places.s <= places.t + (case.s * (not case.is_causal))), x.shape
    )
    if mask_mod is not None:
        assert isinstance(mask_mod, DrawnMaskMod)
        attends = attends & mask_mod.may_attend(places, arrays_of("mask_mod", operands))
    known: dict[str, Any] = {"x": x, "g": g, "t": places.t, "s": places.s}
    known |= {f"o{i}": array_of(case, y, length) for i, y in enumerate(kernel.arrays)}
    tanh = np.tanh(x / case.soft_cap) if case.soft_cap else np.zeros(1)
    capped = case.soft_cap * tanh if case.soft_cap else x
    score, slope, _ = score_mod.modified(capped, attends, places, arrays_of("score_mod", operands))
    slope = slope * (1 - tanh**2)
    if alibi is not None:
        slopes = operands["alibi_slopes"][:1, :, None, None].astype(np.float64)
        score = score - slopes * np.abs(places.t - places.s)
    got = run(kernel.forward, known)
    np.testing.assert_allclose(got[attends], score[attends], rtol=1e-4, atol=1e-4)
    found = got
    if kernel.backward:
        found = run(kernel.backward, known)
        np.testing.assert_allclose(found[attends], (g * slope)[attends], rtol=1e-4, atol=1e-4)
        assert np.isfinite(found).all()
    shorter = without_factor(kernel)
    assert not case.soft_cap or shorter.factor == pytest.approx(1 / case.soft_cap)
    known |= {"x": x * shorter.factor}
    again = run(shorter.forward, known)
    np.testing.assert_allclose(again[attends], got[attends], rtol=1e-5, atol=1e-5)
    if shorter.backward:
        again = shorter.factor * run(shorter.backward, known)
        np.testing.assert_allclose(again[attends], found[attends], rtol=1e-5, atol=1e-5)


def array_of(case: Case, made: NodeArray, length: int) -> np.ndarray:
    """The array that the nodes read, for one batch row with a sequence of `length` keys."""
    if isinstance(made, HeadSlopes):
        return case.operands()["alibi_slopes"][:1, :, None, None].astype(np.float64)
    if isinstance(made, RowKeys):
        t = np.arange(case.t)[None, None, :, None]
        end = np.minimum(t + 1, length) if case.is_causal else np.full_like(t, length)
        bound = end if made.which == "end" else np.zeros_like(t)
        if made.border is None:
            return bound
        narrower = np.minimum if made.which == "end" else np.maximum
        return narrower(bound, array_of(case, made.border, length))
    operands = case.operands()
    b, n = operands["mods_start"][0]
    indices = PairIndices(
        jnp.zeros(1, jnp.int32), jnp.array([[b]]), n + jnp.arange(case.n)[None],
        jnp.arange(case.t)[None], jnp.arange(case.s)[None],
    )  # fmt: skip
    found = xla_array(made, indices, [jnp.asarray(x[:1]) for x in arrays_of(made.mod, operands)])
    return np.asarray(found).astype(np.float64 if made.dtype == "float32" else np.int32)


@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize("first_row", [0, 5])
def test_soft_cap_and_alibi_as_nodes(is_one_sided: bool, first_row: int):
    """Without a score_mod; the last query is aligned with the last of 12 keys."""
    rules = ScoreRules(soft_cap=3.0, alibi=Alibi(2, is_one_sided))
    pairs = Pairs((10, 12), first_row=first_row)
    kernel = kernel_program(rules, pairs, is_backward=True)
    assert isinstance(kernel, KernelProgram) and kernel.arrays == (HeadSlopes(),)
    forward = kernel_program(rules, pairs, is_backward=False)
    assert isinstance(forward, KernelProgram) and kernel.forward == forward.forward
    rng = np.random.default_rng(3)
    x, g = rng.standard_normal((2, 1, 4, 10 - first_row, 12))
    _, _, row, s = np.ogrid[:1, :4, : 10 - first_row, :12]
    slopes = rng.random((1, 4, 1, 1))
    row, s = np.broadcast_arrays(row, s)
    known = {"x": x, "g": g, "t": row, "s": s, "o0": slopes}
    distance = row + first_row + 2 - s
    attends = (distance >= 0) | (not is_one_sided)
    got, expected = run(kernel.forward, known), 3 * np.tanh(x / 3) - slopes * np.abs(distance)
    np.testing.assert_allclose(np.where(attends, got, 0), np.where(attends, expected, 0), atol=1e-6)
    np.testing.assert_allclose(run(kernel.backward, known), g / np.cosh(x / 3) ** 2, rtol=1e-6)
    # The nodes read cuDNN's scores once, and need no select: gradients are 0 past the sequences.
    assert "select" not in kernel.backward and kernel.forward.split().count("x") == 1


@pytest.mark.parametrize(
    ("function", "factor", "forward"),
    [
        (lambda x, b, n, t, s: 3 * x, 1.0, "f0 = mul x #1.0; f1 = mul f0 #3.0"),
        (lambda x, b, n, t, s: jnp.tanh(4 * (x / 8)), 0.5, "f3 = tanh x"),
        (lambda x, b, n, t, s: jnp.square(x / 2), 0.5, "f1 = mul x #1.0; f2 = mul f1 f1"),
        (lambda x, b, n, t, s: jnp.tanh(-2 * x), 1.0, "f0 = mul x #1.0; f1 = mul f0 #-2.0; "),
        (lambda x, b, n, t, s: x / 4 + jnp.tanh(x), 1.0, "f0 = mul x #1.0; f1 = mul f0 #0.25; "),
        (lambda x, b, n, t, s: jnp.sin(x * 2) + jnp.where(s > 3, 1.0, 0.0) * x, 1.0, "f0 = mul x"),
        (lambda x, b, n, t, s: jnp.where(s > t, x / 2, 1.0), 0.5, "f1 = mul x #1.0; "),
    ],
)
def test_leading_factor_of_the_scores_is_split_off(function: Any, factor: float, forward: str):
    """If nothing else reads the score, the kernel multiplies by the factor."""
    program = trace("score_mod", function, (), "float32").program
    rules, pairs = ScoreRules(score_mod=program), Pairs((128, 128))
    kernel = kernel_program(rules, pairs, is_backward=True)
    assert isinstance(kernel, KernelProgram) and kernel.backward
    shorter = without_factor(kernel)
    assert shorter.factor == factor and shorter.forward.startswith(forward)
    assert shorter.forward.split().count("x") == 1
    x, g = np.random.default_rng(4).standard_normal((2, 1, 1, 128, 128))
    t, s = np.broadcast_arrays(*np.ogrid[:128, :128])
    known = {"x": x, "g": g, "t": t, "s": s}
    expected = run(kernel.forward, known), run(kernel.backward, known)
    known = {"x": x * factor, "g": g, "t": t, "s": s}
    np.testing.assert_allclose(run(shorter.forward, known), expected[0], rtol=1e-6)
    gradient = run(shorter.backward, known) if shorter.backward else g
    np.testing.assert_allclose(factor * gradient, expected[1], rtol=1e-6)


def test_alibi_alone_needs_no_backward_nodes():
    kernel = kernel_program(ScoreRules(alibi=Alibi(0, False)), Pairs((8, 8)), is_backward=True)
    assert isinstance(kernel, KernelProgram) and not kernel.backward
    rules = ScoreRules(alibi=Alibi(0, False)), ScoreRules(soft_cap=2.0)
    assert [(x.bends, x.moves) for x in rules] == [(False, True), (True, False)]


def test_backward_nodes_mask_rows_after_the_last_query():
    """Also if the first rows are cut off, because the kernel's tiles begin after them."""
    program = trace("score_mod", lambda x, b, n, t, s: jnp.tanh(x), (), "float32").program
    kernel = kernel_program(
        ScoreRules(score_mod=program), Pairs((256, 2), first_row=254), is_backward=True
    )
    assert isinstance(kernel, KernelProgram) and "lt i0 #256" in kernel.backward
    kernel = kernel_program(ScoreRules(score_mod=program), Pairs((256, 128)), is_backward=True)
    assert isinstance(kernel, KernelProgram) and "lt" not in kernel.backward


def test_score_that_is_read_twice_is_copied():
    def nodes(function: Any) -> str:
        program = trace("score_mod", function, (), "float32").program
        kernel = kernel_program(ScoreRules(score_mod=program), Pairs((256, 256)), is_backward=False)
        assert isinstance(kernel, KernelProgram)
        return kernel.forward

    assert nodes(lambda x, b, n, t, s: x + jnp.tanh(x)).startswith("f0 = mul x #1.0; ")
    assert nodes(lambda x, b, n, t, s: jnp.tanh(x)) == "f0 = tanh x"


SLOPES = jnp.arange(4.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, b, n, t, s: jnp.where(x > 0, x, 0.0), "gt compares floats"),
        (lambda x, b, n, t, s: x + SLOPES[jnp.clip(t - s, 0, 3)], "depends on both t and s"),
        (lambda x, b, n, t, s: x + (t - s) % 3, "rem"),
        (lambda x, b, n, t, s: jax.lax.fori_loop(0, t, lambda i, v: v * 0.9, x), "while"),
        (lambda x, b, n, t, s: jax.lax.fori_loop(0, 3, lambda i, v: v * 0.9, x), "scan"),
        (lambda x, b, n, t, s: x.astype(jnp.bfloat16) * 2, "in bfloat16"),
        (lambda x, b, n, t, s: x + (t - s).astype(jnp.int8), "in int8"),
        (lambda x, b, n, t, s: jax.lax.reduce_precision(x, 8, 7), "reduce_precision"),
        (lambda x, b, n, t, s: jax.lax.cond(t > s, jnp.tanh, jnp.sin, x), "cond"),
        (lambda x, b, n, t, s: jax.lax.cumsum(jnp.stack([x, x]))[1], "of arrays"),
    ],
)
def test_function_without_nodes_gives_a_reason(function, message: str):
    program = trace("score_mod", function, (), "float32").program
    reason = kernel_program(ScoreRules(score_mod=program), Pairs((8, 8)), is_backward=False)
    assert isinstance(reason, Reason) and message in str(reason)
    assert "(at test_nodes.py:" in str(reason) and "test_nodes" not in reason.rule


@needs_cudnn
@pytest.mark.filterwarnings("ignore:is_causal=True with mods.prefix_lm")
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "sm120"])
def test_cudnn_plans_mods(target: str):
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    found = explain(
        x, x, x, target=target, score_mod=mods.soft_cap(20.0), is_causal=True,
        mask_mod=mods.prefix_lm(jnp.array([3, 9])),
    )  # fmt: skip
    assert (found.chosen_forward, found.chosen_backward) == ("cudnn", "cudnn")
    # The prefix is an array by row; these architectures have room only for lse and delta.
    assert ("mask_mod: as a mask" in str(found)) == (target in ("sm80", "sm120"))
    # The gradient of an added array needs no kernel.
    found = explain(x, x, x, target=target, score_mod=mods.alibi(SLOPES), is_causal=True)
    assert (found.chosen_forward, found.chosen_backward) == ("cudnn", "cudnn")
    assert "the gradient of alibi_slopes: by XLA, beside the kernel" in str(found)


def test_equal_masks_serve_calls_of_different_lengths():
    """Each call traces its program again: facts cached for one program must serve an equal one."""
    for length in (128, 256):
        mask_mod = trace("mask_mod", mods.dilated_window(64, 4), (), "float32").program
        rules, pairs = ScoreRules(mask_mod=mask_mod), Pairs((length, length))
        assert isinstance(kernel_program(rules, pairs, is_backward=False), KernelProgram)


def test_border_of_a_mask_and_lengths_share_one_array():
    """The backward pass has room for only a few arrays by row."""

    def prefix(b: Any, n: Any, t: Any, s: Any, x: Any) -> Any:
        return (s <= t) | (s < x[b])

    mask_mod = trace("mask_mod", prefix, (jnp.zeros(2, jnp.int32),), "float32").program
    score_mod = trace("score_mod", lambda x, b, n, t, s: jnp.tanh(x), (), "float32").program
    pairs = Pairs((256, 192), band=(5, None), has_runtime_lengths=True)
    rules = ScoreRules(score_mod=score_mod, mask_mod=mask_mod)
    backward = kernel_program(rules, pairs, is_backward=True)
    assert isinstance(backward, KernelProgram)
    (array,) = backward.arrays
    assert isinstance(array, RowKeys) and array.which == "end" and array.border is not None
    forward = kernel_program(rules, pairs, is_backward=False)
    assert isinstance(forward, KernelProgram)
    assert forward.arrays == (array.border,)
