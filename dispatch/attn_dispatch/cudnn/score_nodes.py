"""The changes of a call's scores (soft cap, ALiBi, mods) as nodes of a cuDNN graph."""

from __future__ import annotations

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.caps_and_slopes import Alibi
from attn_dispatch.programs.factor import without_factor
from attn_dispatch.programs.kernel import KernelProgram, Pairs, ScoreRules, kernel_program
from attn_dispatch.reason import Reason, Rule, broken
from attn_dispatch.semantics.real_rows import leading_padding_rows
from attn_dispatch.semantics.scaled_query import is_normal, positive_scale

MAX_NODES = 256
"""The most operations of a cuDNN graph, cuDNN's own included; cuda_backend refuses more. Slightly
fewer may also be too many, which cuDNN then reports."""

MAX_NODE_ARRAYS = 62
"""The most arrays that the operations read. Calls with 62 run; with 100, cuDNN plans the call and
fails when it runs (H200, 9.19)."""


def nodes_of(spec: AttentionSpec, *, packed: bool) -> KernelProgram | Reason:
    """The changes of scores as nodes, or why cuDNN cannot express them.

    Args:
      packed: whether arrays are passed packed; otherwise their padding is 0.
    """
    (left, right), offset = spec.band, _offset(spec)
    left = None if left is None else left - offset
    right = None if right is None else right + offset
    pairs = Pairs(
        lengths=spec.longest_sequences,
        first_row=leading_padding_rows(spec),
        band=(left, right),
        has_runtime_lengths=spec.has_runtime_lengths,
        has_runtime_diagonal=spec.meaning.causal_alignment == "bottom_right"
        and spec.has_runtime_lengths,
        is_padding_zero=not packed,
    )
    program = kernel_program(score_rules_of(spec), pairs, is_backward=spec.is_backward)
    if isinstance(program, Reason):
        return program
    if reasons := broken(_GRAPH_RULES, program):
        return reasons[0]
    shorter = without_factor(program)
    return shorter if is_normal(positive_scale(spec) * shorter.factor) else program


def _operations(program: KernelProgram) -> int:
    return sum(len(x.split(";")) for x in (program.forward, program.backward) if x)


_GRAPH_RULES = (
    Rule[KernelProgram](
        "cudnn/mods/operations",
        lambda p: _operations(p) > MAX_NODES,
        f"mods: {{operations:,}} operations, and a cuDNN graph holds at most {MAX_NODES}",
        facts=lambda p: {"operations": _operations(p)},
    ),
    Rule[KernelProgram](
        "cudnn/mods/arrays",
        lambda p: len(p.arrays) > MAX_NODE_ARRAYS,
        f"mods: {{arrays:,}} arrays, and a cuDNN graph holds at most {MAX_NODE_ARRAYS}",
        facts=lambda p: {"arrays": len(p.arrays)},
    ),
)


def score_rules_of(spec: AttentionSpec) -> ScoreRules:
    """The changes of a call's scores, other than bias, lengths and band."""
    alibi = None
    if spec.has("alibi_slopes"):
        right = spec.band[1]
        alibi = Alibi(_offset(spec), is_one_sided=right is not None and right <= 0)
    return ScoreRules(
        spec.meaning.logits_soft_cap, spec.meaning.score_mod, alibi, spec.meaning.mask_mod
    )


def _offset(spec: AttentionSpec) -> int:
    """The key on the diagonal of query 0, in a batch row of full length."""
    is_bottom_right = spec.meaning.causal_alignment == "bottom_right"
    return spec.seq_len_kv - spec.seq_len_q if is_bottom_right else 0
