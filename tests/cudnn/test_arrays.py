"""The arrays of cuDNN's custom calls, in every variant of a call, with NumPy in cuDNN's place.

A GPU runs the first variant that cuDNN plans there; here each of them must give the results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.call.options import is_mod_operand
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn import arrays as cudnn_arrays
from attn_dispatch.cudnn import rules as cudnn_rules
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.drawn_mods import Step
from attn_dispatch_tools.verify.reference import Operands, poison_padding, reference
from attn_dispatch_tools.verify.small_cases import CASES
from tests.support.cudnn_in_numpy import keep_mask, names_of, run
from tests.support.option_parts import with_facts

_BOTTOM_RIGHT: dict[str, Any] = {"is_causal": True, "alignment": "bottom_right"}

STEPS = (
    Step("c tanh(x / c)", 0, 0, 1.5, 8, "n"),
    Step("x + r tanh((t - s) / 16)", 1, 0, 1.0, 8, "b"),
    Step("x / (1 + y²)", 2, 0, 1.0, 8, "n"),
    Step("x r", 3, 0, 1.0, 8, "t"),
    Step("x - |t - s| / w", 4, 0, 1.0, 8, "n"),
    Step("x if t - s < w else y", 5, 2, 1.0, 3, "n"),
    Step("x r", 6, 0, 1.0, 3, "n"),
)
PREFIX = ("s <= t or s < x[b]", 1)
_IDS = (1,) * 5 + (2,) * 4 + (0,) + (3,) * 2 + (4,) * 5

EDGES = (
    Case("one_key_bias", s=1, bias=(2, 4, 10, 1), **_BOTTOM_RIGHT),
    Case("one_key_mask", s=1, mask=(2, 1, 10, 1), **_BOTTOM_RIGHT),
    Case("one_query_bias", t=1, bias=(1, 4, 1, 14), sinks=1),
    Case("one_query_dropout", t=1, dropout=0.4, sinks=1),
    Case("more_queries_bias", t=14, s=10, bias=(2, 4, 14, 10), lse_grad=True, **_BOTTOM_RIGHT),
    Case("more_keys_bias", bias=(1, 1, 10, 14), **_BOTTOM_RIGHT),
    Case("more_keys_alibi", alibi=1, alignment="bottom_right", window=(9, 2)),
    Case("scale_0", scale=0.0, lse_grad=True, sinks=1),
    Case("scale_negative", scale=-0.4, soft_cap=2.0, is_causal=True),
    Case("scale_negative_lengths", scale=-0.4, q_lengths=(7, 10), kv_lengths=(0, 14)),
    Case("scale_0_bias", scale=0.0, bias=(1, 4, 10, 14), dropout=0.3),
    Case("wide_heads", h=200, v=24, kv_lengths=(3, 14)),
    Case("row_max", needs_max=True, sinks=1, t=14, s=10, **_BOTTOM_RIGHT),
    Case("row_max_lengths", needs_max=True, b=2, q_lengths=(7, 10), kv_lengths=(0, 14)),
    Case("lengths_mask_wrong", mask=(2, 1, 10, 14), q_lengths=(7, 11), kv_lengths=(14, 9)),
    Case("lengths_wrong_bias_max", bias=(2, 4, 10, 14), kv_lengths=(15, 9), needs_max=True),
    Case("mods", score_mod=STEPS, mask_mod=PREFIX, is_causal=True, sinks=1, lse_grad=True),
    Case("mods_cap_bias", score_mod=STEPS, soft_cap=3.0, bias=(2, 1, 10, 14), alibi=1),
    Case("mods_more_queries", score_mod=STEPS, mask_mod=PREFIX, t=14, s=10, **_BOTTOM_RIGHT),
    Case("mods_lengths", score_mod=STEPS, q_lengths=(7, 10), kv_lengths=(3, 14), window=(5, 1)),
    Case(
        "mods_bottom_right", score_mod=STEPS, q_lengths=(7, 9), kv_lengths=(3, 14), **_BOTTOM_RIGHT
    ),
    Case(
        "mods_ragged",
        score_mod=STEPS,
        mask_mod=PREFIX,
        cu_q=((0, 2, 7), (0, 5, 10)),
        cu_kv=((0, 5, 9), (0, 3, 14)),
        longest=(5, 11),
        **_BOTTOM_RIGHT,
    ),
    Case(
        "mods_packed",
        score_mod=STEPS,
        mask_mod=PREFIX,
        q_segments=(_IDS[:10], _IDS[1:11]),
        kv_segments=(_IDS[2:16], _IDS[:14]),
        max_segments=4,
        is_causal=True,
        mods_start=(2, 1),
    ),
    Case(
        "mods_copies",
        b=4,
        score_mod=STEPS,
        mask_mod=PREFIX,
        own_arrays=True,
        transform="vmap",
        is_causal=True,
        mods_start=(1, 2),
    ),
    Case("mods_one_query", t=1, score_mod=STEPS, mask_mod=PREFIX),
    Case("mods_dropout", score_mod=STEPS, dropout=0.3, kv_lengths=(14, 5)),
    Case("lengths_mask", mask=(2, 1, 10, 14), dead_rows=True, q_lengths=(7, 0), kv_lengths=(14, 9)),
)


def known(case: Case) -> Case:
    """With max_segments where there are segment ids."""
    without = case.q_segments is not None and case.max_segments is None
    return replace(case, max_segments=5) if without else case


def rules(spec: AttentionSpec) -> list[str]:
    """Reasons but for float32, in which results can be compared closely."""
    reasons = cudnn_rules.not_supported_reasons(spec)
    return [reason for reason in reasons if reason.rule != "dtype"]


SMALL = [known(case) for case in (*CASES, *EDGES) if case.dtype == "float32"]
AS_THEY_ARE = [case for case in SMALL if not rules(spec_of(case.forward_options(), case.avals()))]
ORDERS = ("q kv", "q", "kv")
IN_ORDERS = [
    replace(case, heads_first=ORDERS[i % len(ORDERS)]) for i, case in enumerate(AS_THEY_ARE)
]
RUN = [*AS_THEY_ARE, *IN_ORDERS]


def name(case: Case) -> str:
    return " ".join([case.name, case.heads_first]).strip()


def to_jax(arrays: Operands) -> dict[str, Any]:
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def check(spec: AttentionSpec, results: tuple[Any, ...], expected: Operands) -> None:
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in spec.results]
    for name, got in zip(spec.result_names, results, strict=True):
        if name != "keep":
            x = expected[name]
            close = 1e-4 * np.abs(x[np.isfinite(x)]).max(initial=1)
            np.testing.assert_allclose(got, x, rtol=1e-4, atol=close, err_msg=name)


def shapes_of(arrays: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: x.shape for name, x in arrays.items()}


@pytest.mark.parametrize("case", RUN, ids=name)
def test_every_variant_gives_the_results(case: Case):
    operands, drops = case.operands(), case.dropout > 0
    spec = spec_of(case.forward_options(needs_keep=drops), operands)
    assert not rules(spec)
    arrays = to_jax(poison_padding(spec.options, operands))
    for call in variants_of(spec):
        if cudnn_rules.variant_reason(call, "sm90"):
            continue
        done = run(call, cudnn_arrays.forward_operands(spec, call, arrays))
        assert shapes_of(done) == shapes_of(cudnn_arrays.forward_shapes(call))
        results = cudnn_arrays.forward_results(spec, call, arrays, to_jax(done))
        keep = np.asarray(results[spec.result_names.index("keep")]) if drops else None
        check(spec, results, reference(spec.options, operands, keep))


@pytest.mark.parametrize("case", RUN, ids=name)
def test_every_variant_gives_the_gradients(case: Case):
    """All but those that are refused: of ALiBi's slopes, and of a bias alike for all keys."""
    operands, options = case.operands() | case.cotangents(), case.backward_options()
    residuals = reference(case.forward_options(), case.operands())
    operands |= {name: residuals[name].astype(np.float32) for name in ("out", "lse")}
    wanted = [x for x in options.wanted.gradients if x != "alibi_slopes" and not is_mod_operand(x)]
    wanted = [x for x in wanted if x != "bias" or operands["bias"].shape[3] > 1 or case.s == 1]
    spec = spec_of(with_facts(options, gradients=tuple(wanted)), operands)
    assert not rules(spec)
    for call in variants_of(spec):
        if cudnn_rules.variant_reason(call, "sm90"):
            continue
        arrays, keep = poisoned(spec, operands), None
        custom = cudnn_arrays.backward_operands(spec, call, to_jax(arrays))
        if case.dropout:
            mask = keep_mask(call, np.asarray(custom[names_of(call).index("seed")]))
            keep = np.ones((case.b, case.n, case.t, case.s), bool)
            rows = min(case.t, mask.shape[2])  # those cut off attend nothing
            keep[:, :, case.t - rows :] = mask[:, :, :rows]
            dropped = reference(case.forward_options(), case.operands(), keep)
            arrays = poisoned(spec, operands | {"out": dropped["out"].astype(np.float32)})
            custom = cudnn_arrays.backward_operands(spec, call, to_jax(arrays))
        done = run(call, custom)
        assert shapes_of(done) == shapes_of(cudnn_arrays.backward_shapes(call))
        results = cudnn_arrays.backward_results(spec, call, to_jax(arrays), to_jax(done))
        check(spec, results, reference(spec.options, operands, keep))


def poisoned(spec: AttentionSpec, operands: Operands) -> Operands:
    """With NaN in padding, but for lse, which is our own: -inf there and in wrong rows."""
    lse = np.where(np.isnan(operands["lse"]), np.float32(-np.inf), operands["lse"])
    return poison_padding(spec.options, operands) | {"lse": lse}
