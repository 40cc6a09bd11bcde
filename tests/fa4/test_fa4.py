"""FlashAttention-4, compiled: its arrays with NumPy as the kernels, and every reason."""

from __future__ import annotations

from dataclasses import fields, replace
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch import explain, fa4
from attn_dispatch.devices import clear_rows
from attn_dispatch.devices.target import parse
from attn_dispatch.fa4 import call, compiled, interval_calls, rules
from attn_dispatch.fa4.call import kernels_for
from attn_dispatch.fa4.compiled import CompiledLibrary, KernelSet
from attn_dispatch.fa4.score_variant import variant_of
from attn_dispatch.semantics.intervals import has_intervals
from attn_dispatch_tools.build_fa4.sets import SETS
from attn_dispatch_tools.verify import drawn_masks, drawn_mods, draws
from attn_dispatch_tools.verify.case import Case, Step, spec_of
from attn_dispatch_tools.verify.mask_draws import mask_examples
from tests.support import interval_kernels_in_numpy as in_numpy
from tests.support.comparing import check_both_directions
from tests.support.flash_cases import NAMED
from tests.support.small_cases import SMALL

SM90, SM100 = parse("sm90"), parse("sm100")


def kernel_set(head_dim: int, head_dim_v: int, dtype: str, arch: str = "sm90") -> KernelSet:
    """Kernels of small tiles, of which a small call has several."""
    return KernelSet(
        f"{arch}_{head_dim}_{head_dim_v}_{dtype}", arch, dtype, head_dim, head_dim_v,
        forward_tile_m=4, forward_tile_n=3, backward_tile_m=2, backward_tile_n=5,
        backward_subtiles=2, differentiates_grouped_heads=head_dim == head_dim_v,
        takes_sinks=arch == "sm90",
    )  # fmt: skip


HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
LIBRARY = CompiledLibrary(
    ModuleType("_cuda"),
    path="/kernels.so",
    versions="fa4-jax 0.1.0",
    sets=tuple(
        kernel_set(*dims, dtype)
        for dtype in ("bfloat16", "float16", "float32")
        for dims in HEAD_DIMS
    ),
)
"""Kernels of float32 exist here alone; they allow a close comparison."""


class EveryChange(CompiledLibrary):
    """The library, with every set also for every change of scores."""

    def set_for(self, *call: object, variant: str = "", **facts: bool) -> KernelSet | None:
        found = super().set_for(*call, **facts)
        return found and replace(found, variant=variant)


EVERY_CHANGE = EveryChange(**{x.name: getattr(LIBRARY, x.name) for x in fields(LIBRARY)})


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(compiled, "find", lambda: LIBRARY)


TWO_ROWS_OF_TILES = KernelSet(
    "wide", "sm100", "float32", 64, 64,
    forward_tile_m=8, forward_tile_n=3, backward_tile_m=4, backward_tile_n=6,
    backward_subtiles=1, differentiates_grouped_heads=True,
)  # fmt: skip
"""Kernels for another architecture, with other tiles."""


@pytest.fixture
def library_for_both(monkeypatch):
    both = replace(LIBRARY, sets=(*LIBRARY.sets, TWO_ROWS_OF_TILES))
    monkeypatch.setattr(compiled, "find", lambda: both)


@pytest.fixture
def kernels(monkeypatch):
    """NumPy as the kernels, with every change of scores."""
    codes = {"": in_numpy.Code()}

    def recorded(change):
        found = variant_of(change)
        codes[found.digest] = in_numpy.Code(found.forward, found.backward)
        return found

    def forward(query, key, value, rows, lists, scale, arch, change, sinks):
        tile = interval_calls.forward_set(query, value, arch).forward_tiles
        code, read = codes[change.variant], tuple(x.reshape(-1) for x in change.arrays)
        return in_numpy.forward(tile, query, key, value, rows, lists, scale, sinks, code, read)

    def backward(query, key, value, out, lse, out_grad, lse_grad, rows, lists, scale, arch, change):
        tile = interval_calls.backward_set(query, value, arch).backward_tiles
        lse_grad = jnp.zeros_like(lse) if lse_grad is None else lse_grad
        operands = (query, key, value, out, lse, out_grad, lse_grad)
        code, read = codes[change.variant], tuple(x.reshape(-1) for x in change.arrays)
        return in_numpy.backward(tile, operands, rows, lists, scale, code, read)

    monkeypatch.setattr(clear_rows, "_native", lambda: None)
    monkeypatch.setattr(compiled, "find", lambda: EVERY_CHANGE)
    monkeypatch.setattr(call, "variant_of", recorded)
    monkeypatch.setattr(interval_calls, "forward", forward)
    monkeypatch.setattr(interval_calls, "backward", backward)


def is_supported(case: Case) -> bool:
    """True if the kernels run the case, apart from float32."""
    forward = spec_of(case.forward_options(), case.avals())
    specs = (forward, forward.backward(case.backward_options(case.wanted or None)))
    return all(
        x.rule == "dtype" for spec in specs for x in rules.not_supported_reasons(spec, EVERY_CHANGE)
    )


ANY_CALL = [x for x in draws.examples(90, 20270112) if x.t * x.s < 2**15]
MASKED = mask_examples(60, 20270113, draws.SMALL)
DRAWN = [replace(x, dtype="float32") for x in (*ANY_CALL, *MASKED)]

QKV = ("query", "key", "value")


def changing(case: Case) -> bool:
    """True if the case changes scores."""
    return bool(case.score_mod) or case.soft_cap is not None or case.alibi is not None


CHANGING = [
    replace(x, wanted=QKV)
    for x in (*NAMED, *SMALL, *DRAWN)
    if changing(x) and not x.inference  # of others the reference has no gradients
]
"""Without the gradients of what is read, which these kernels do not compute."""

_SEGMENTS = {"q_segments": ((1, 1, 1, 2, 2, 2, 2, 3, 0, 0),) * 2, "max_segments": 3, "s": 10}
SINKS = {
    "grouped": {"n": 8},
    "of_batch": {"sinks": 2, "window": (3, 0), "is_causal": True},
    "lengths": {"q_lengths": (7, 10), "kv_lengths": (0, 9), "sinks": 2, "mixed_poison": True},
    "segments": _SEGMENTS | {"kv_segments": _SEGMENTS["q_segments"], "is_causal": True},
    "dead_rows": {"t": 14, "s": 10, "is_causal": True, "alignment": "bottom_right"},
    "mask": {"mask": (2, 4, 10, 14), "dead_rows": True, "sinks": 2},
    "soft_cap": {"soft_cap": 5.0, "is_causal": True, "wanted": (*QKV, "sinks")},
    "negative_scale": {"scale": -0.4},
    "alone": {"wanted": ("sinks",)},
    "without": {"wanted": QKV},
    "no_gradient_of_lse": {"sinks": 2, "lse_grad": False},
}
WITH_SINKS = [Case(f"sinks/{x}", **({"sinks": 1, "lse_grad": True} | y)) for x, y in SINKS.items()]

CASES = [x for x in (*NAMED, *SMALL, *DRAWN, *CHANGING, *WITH_SINKS) if is_supported(x)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_agree_with_the_reference(kernels, case: Case):
    check_both_directions(fa4, SM90, case)


def test_another_architecture_has_kernels_of_its_own_with_lists_for_their_tiles(
    kernels, library_for_both, monkeypatch
):
    seen = set()
    forward_set, backward_set = interval_calls.forward_set, interval_calls.backward_set
    for name, found in (("forward_set", forward_set), ("backward_set", backward_set)):

        def noted(*arguments, found=found):
            kernels = found(*arguments)
            seen.add(kernels.name)
            return kernels

        monkeypatch.setattr(interval_calls, name, noted)
    case = Case("call", t=21, s=17, n=4, k=2, h=40, is_causal=True, lse_grad=True)
    check_both_directions(fa4, SM100, case)
    assert seen == {"wide"}


def test_sinks_run_on_the_kernels():
    assert set(WITH_SINKS) <= set(CASES)
    assert len([x for x in CASES if x.sinks]) > 30


def test_drawn_masks_run_on_the_kernels():
    masked = {x.name for x in MASKED if x.mask_mod or x.mask}
    assert len(masked & {x.name for x in CASES}) > 0.7 * len(masked) > 20


@pytest.mark.parametrize("mod", drawn_masks.FORMULAS)
@pytest.mark.parametrize("facts", [{}, {"is_causal": True, "lse_grad": True}], ids=["", "causal"])
def test_mask_mods_agree_with_the_reference(kernels, mod: str, facts):
    case = Case("mod", t=13, s=11, mask_mod=(mod, 3), **facts)
    assert is_supported(case)
    check_both_directions(fa4, SM90, case)


@pytest.mark.parametrize("masks", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("s", [33, 64, 70])
def test_dense_masks_agree_with_the_reference(kernels, masks, s: int):
    """With rows that see nothing, NaN in padding, and keys that end inside a word."""
    case = Case(f"dense/{masks}", s=s, mask=(*masks, 10, s), dead_rows=True, lse_grad=True)
    for one in (case, replace(case, is_causal=True, q_lengths=(7, 10), kv_lengths=(s, 9))):
        assert is_supported(one)
        check_both_directions(fa4, SM90, one)


def test_the_cases_have_masks_of_both_forms():
    specs = [spec_of(x.forward_options(), x.avals()) for x in CASES]
    assert {has_intervals(x) for x in specs} == {True, False}
    assert any(not has_intervals(x) and x.has("query_segment_ids") for x in specs)


@pytest.mark.parametrize("formula", [*drawn_mods.FORMULAS, *drawn_mods.ALONE])
@pytest.mark.parametrize("read", ["n", "b", "s"])
def test_score_mods_agree_with_the_reference(kernels, formula: str, read: str):
    step = Step(formula, 0, 0, 3.0, 4, read)
    case = Case("mod", b=2, t=13, s=11, n=4, k=2, score_mod=(step,), wanted=QKV)
    if formula in drawn_mods.OF_THE_PAST:
        case = replace(case, is_causal=True)
    assert is_supported(case)
    check_both_directions(fa4, SM90, case)


def test_drawn_calls_that_change_scores_are_among_the_cases():
    assert sum(map(changing, CASES)) >= 8


def arrays(*, t: int = 64, n: int = 8, k: int = 8, h: int = 64) -> list[jax.ShapeDtypeStruct]:
    shapes = ((2, t, n, h), (2, t, k, h), (2, t, k, h))
    return [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]


def reasons(*shapes: jax.ShapeDtypeStruct, target: str = "sm90", **options) -> list[list[str]]:
    """The sentences against each direction."""
    found = explain(*shapes, implementation="fa4", target=target, **options)
    return [list(map(str, x[0].reasons)) for x in (found.forward, found.backward)]


def test_calls_that_the_kernels_run_have_no_reason(library):
    def prefix(b, n, t, s):
        return (s <= t) | (s < 7)

    assert reasons(*arrays(k=2), mask_mod=prefix) == [[], []]
    assert reasons(*arrays(k=1), is_causal=True, local_window_size=(5, 0)) == [[], []]
    assert reasons(*arrays(), mask_mod=lambda b, n, t, s: (t + s) % 3 > n) == [[], []]
    assert reasons(*arrays(), mask=jax.ShapeDtypeStruct((2, 8, 64, 64), bool)) == [[], []]


@pytest.mark.parametrize(
    ("call", "options", "expected"),
    [
        ({"h": 264}, {}, "got 264/264 bfloat16"),
        ({}, {"target": "sm80"}, "kernels are compiled for sm90 and sm100, and this is NVIDIA A"),
        ({}, {"target": "mi300x"}, "FlashAttention runs on NVIDIA GPUs"),
        ({}, {"logits_soft_cap": 3.0}, "no kernels are compiled with this logits_soft_cap"),
        (
            {"t": 2**18},
            {"mask_mod": lambda b, n, t, s: (t + s) % 3 > 0},
            "a mask that is not known to be two ranges of keys for each query, of 8,589,934,592",
        ),
        ({"t": 2**20}, {"is_causal": True}, "lists of tiles of "),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_every_reason_is_given(library, call, options, expected):
    for direction in reasons(*arrays(**call), **options):
        assert [x for x in direction if expected in x], direction


SLOPES = jnp.ones(8)


@pytest.mark.parametrize(
    ("call", "options", "rule", "sentence"),
    [
        ({}, {"logits_soft_cap": 30.0}, "mod_not_compiled",
         "remedy: run `attn-dispatch build-fa4 --add --mod 'attn_dispatch.mods:soft_cap(30)'`"),
        ({}, {"alibi_slopes": SLOPES}, "mod_not_compiled",
         "remedy: run `attn-dispatch build-fa4 --add --mod 'attn_dispatch.mods:alibi([1.0])'`"),
        ({}, {"score_mod": lambda x, b, n, t, s: x * SLOPES[n]}, "mod_not_compiled",
         "no kernels are compiled with this score_mod (remedy: run `attn-dispatch build-fa4 --add "
         "--mod MODULE:FUNCTION`, which compiles it into kernels)"),
        ({}, {"score_mod": lambda x, b, n, t, s: x * 2, "logits_soft_cap": 3.0}, "mod_not_compiled",
         "no kernels are compiled with this logits_soft_cap and score_mod (remedy: run "
         "`attn-dispatch build-fa4 --add --mod MODULE:FUNCTION`, which compiles one score_mod that "
         "does all of it into kernels)"),
        ({}, {"score_mod": lambda x, b, n, t, s: x * jnp.sort(SLOPES)[n]}, "mods/arrays",
         "score_mod: sort of arrays; only single elements can be computed (at test_fa4.py:"),
    ],
)  # fmt: skip
def test_changes_of_scores_that_are_not_compiled_name_the_command(
    library, call, options, rule: str, sentence: str
):
    found = explain(*arrays(**call), implementation="fa4", target="sm90", **options)
    reasons = {x.rule: x.with_remedy for x in found.forward[0].reasons}
    assert sentence in reasons[f"fa4/{rule}"]


def test_the_widest_sets_are_those_of_build_fa4():
    for arch, widest in rules._WIDEST.items():
        assert widest == max(x.head_dim for x in SETS.values() if x.arch == arch and not x.is_wide)
        assert {x.dtype for x in SETS.values() if x.arch == arch} == {"bfloat16", "float16"}


@pytest.mark.parametrize(
    ("h", "options", "expected"),
    [
        (128, {}, {"fa4/head_dim": "run `attn-dispatch build-fa4 --add --arch sm90`"}),
        (264, {}, {"fa4/wide_head_dim": "run `attn-dispatch build-fa4 --add --arch sm90`"}),
        (520, {}, {"fa4/wide_head_dim": ""}),
        *(
            (h, {"logits_soft_cap": 30.0}, {"fa4/mod_not_compiled": (
                "run `attn-dispatch build-fa4 --add --mod 'attn_dispatch.mods:soft_cap(30)'`, "
                "which compiles it into kernels"
            )})
            for h in (64, 128)
        ),
    ],
)  # fmt: skip
def test_fewer_sets_than_build_fa4_has_are_a_reason_with_its_command(
    monkeypatch, h: int, options, expected: dict[str, str]
):
    one = replace(LIBRARY, sets=(kernel_set(64, 64, "bfloat16"),))
    monkeypatch.setattr(compiled, "find", lambda: one)
    found = explain(*arrays(h=h), implementation="fa4", target="sm90", **options)
    for direction in (found.forward[0], found.backward[0]):
        assert {x.rule: x.remedy for x in direction.reasons} == expected
        assert len(direction.reasons) == len(expected)


def by_place(x, b, n, t, s):
    return x - SLOPES[n] * (t - s)


SEGMENTS = {"query_segment_ids": jnp.ones((2, 64), jnp.int32), "max_segments": 3}


@pytest.mark.parametrize(
    ("options", "rules_of_call"),
    [
        ({"score_mod": by_place}, set()),
        ({"score_mod": by_place, **SEGMENTS}, {"fa4/mod_positions"}),
        ({"logits_soft_cap": 3.0, **SEGMENTS}, set()),
        ({"alibi_slopes": SLOPES, **SEGMENTS}, {"fa4/mod_positions"}),
        ({"alibi_slopes": jnp.ones((2, 8))}, {"fa4/mod_copies"}),
        ({"alibi_slopes": SLOPES, "is_causal": True, "causal_alignment": "bottom_right",
          "key_value_seq_lengths": jnp.asarray([3, 9])}, {"fa4/slopes_from_bottom_right"}),
        ({"alibi_slopes": SLOPES, "is_causal": True, "causal_alignment": "bottom_right"}, set()),
    ],
)  # fmt: skip
def test_calls_whose_changes_of_scores_do_not_fit_are_refused(kernels, options, rules_of_call):
    found = explain(*arrays(), implementation="fa4", target="sm90", **options)
    # A bias of slopes, which the call is tried with then, is refused as well.
    assert {x.rule for x in found.forward[0].reasons} - {"feature/bias"} == rules_of_call


def test_positions_that_floats_do_not_hold_are_refused(kernels):
    for length, is_refused in ((2**24, False), (2**24 + 1, True)):
        for options in ({"score_mod": by_place}, {"logits_soft_cap": 3.0}):
            found = explain(*arrays(t=length), implementation="fa4", target="sm90", **options)
            rules_of_call = {x.rule for x in found.forward[0].reasons}
            assert ("fa4/mod_length" in rules_of_call) == (is_refused and "score_mod" in options)


def test_gradients_of_what_a_mod_reads_are_refused(kernels):
    step = Step("x r", 0, 0, 3.0, 4, "n")
    case = Case("mod", score_mod=(step,), dtype="bfloat16")
    spec = spec_of(case.forward_options(), case.avals()).backward(case.backward_options())
    (reason,) = rules.not_supported_reasons(spec, EVERY_CHANGE)
    assert reason.rule == "feature/the gradient of what score_mod reads"


def test_kernels_that_are_not_compiled_name_the_command(monkeypatch, tmp_path):
    missing = compiled.load(ModuleType("_cuda"), tmp_path / "none.so")
    monkeypatch.setattr(compiled, "find", lambda: missing)
    assert fa4.version() is None
    for (reason,) in reasons(*arrays()):
        assert "`attn-dispatch build-fa4`" in reason


def test_kernels_that_have_never_run_are_for_callers_who_name_them(library_for_both):
    case = Case("call", dtype="bfloat16", h=64)
    spec = spec_of(case.forward_options(), case.avals())
    (reason,) = (x for x in fa4.not_supported_reasons(spec, SM100) if x.rule == "fa4/never_run")
    assert reason.with_remedy == (
        "these kernels have been compiled for sm100, but never run there; they run calls that name "
        'them (remedy: implementation="fa4")'
    )
    named = {x.rule for x in fa4.not_supported_reasons(spec.by("fa4"), SM100)}
    assert named == {"fa4/head_dim"}  # the set is for float32
    case = replace(case, dtype="float32")
    in_float32 = spec_of(case.forward_options(), case.avals())
    assert fa4.plan(in_float32, SM100).engine.endswith("for sm100, but never run there")


def test_kernels_for_another_architecture_alone_name_the_command(library):
    command = "`attn-dispatch build-fa4 --add --arch sm100`"
    assert fa4.unusable_reason(SM100) == (
        f"FlashAttention-4's kernels are not compiled for sm100: run {command}"
    )
    for direction in reasons(*arrays(), target="b200"):
        assert [x for x in direction if command in x], direction


@pytest.mark.parametrize(
    ("h", "v", "k", "named", "named_back"),
    [
        (64, 64, 4, "64", "64"),
        (72, 40, 4, "96", "96"),
        (192, 128, 4, "192/128", "192/128"),
        (192, 128, 2, "192/128", "192"),
        (136, 136, 4, "192", "192"),
        (193, 128, 4, "256", "256"),
    ],
)
def test_plan_names_the_narrowest_kernels_and_counts_the_scratch_memory(
    library, h, v, k, named, named_back
):
    case = Case("call", b=2, t=300, s=200, n=4, k=k, h=h, v=v, dtype="bfloat16")
    forward = spec_of(case.forward_options(), case.avals())
    back = forward.backward(case.backward_options())
    for spec, name in ((forward, named), (back, named_back)):
        assert fa4.plan(spec, SM90).engine == f"FlashAttention-4 (fa4-jax 0.1.0), head dim {name}"
    assert fa4.plan(forward, SM90).workspace_bytes == 0
    kernels = kernels_for(back, LIBRARY)
    assert kernels is not None
    numbers = 2 * 4 * 300 * (kernels.head_dim + 2)  # of dq's sums, and two for each row
    if k != 4:
        numbers += 2 * k * 200 * (kernels.head_dim + kernels.head_dim_v)
    assert fa4.plan(back, SM90).workspace_bytes == 4 * numbers


def test_plan_says_which_form_the_mask_has_and_counts_its_bytes(library):
    plain = Case("call", b=2, t=300, s=200, n=4, k=4, h=64, v=64, dtype="bfloat16")
    masked = replace(plain, mask=(1, 4, 300, 200))
    by_rows, by_bits = (
        fa4.plan(spec_of(x.forward_options(), x.avals()), SM90) for x in (plain, masked)
    )
    assert by_bits.engine == f"{by_rows.engine}, mask of a bit a pair"
    lists = 4 * 75 * 2 * (1 + 67)  # 75 tiles of queries by 67 of keys
    assert by_rows.other_bytes == 2 * (lists + 16 * 300)
    assert by_bits.other_bytes == 4 * (lists + 4 * 300 * 7)
