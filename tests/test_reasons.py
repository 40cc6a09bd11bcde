"""Reasons as data: when two are equal, the tables of rules, and remedies that hold."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

import attn_dispatch
from attn_dispatch import aiter, cudnn, fa4, flash, xla
from attn_dispatch.aiter import call_rules as aiter_call_rules
from attn_dispatch.aiter import rules as aiter_rules
from attn_dispatch.aiter.asm_rules import rules_of as asm_rules_of
from attn_dispatch.aiter.release import DEV18, Release
from attn_dispatch.call.options import backward_options
from attn_dispatch.cudnn import rules as cudnn_rules
from attn_dispatch.cudnn.call import CudnnCall, variants_of
from attn_dispatch.devices.target import parse
from attn_dispatch.fa4 import rules as fa4_rules
from attn_dispatch.fa4 import tangent_calls as fa4_tangents
from attn_dispatch.fa4 import wide_calls as fa4_wide
from attn_dispatch.flash import rules as flash_rules
from attn_dispatch.programs.kernel import Pairs, ScoreRules, kernel_program
from attn_dispatch.programs.tracing import trace
from attn_dispatch.reason import Reason, Rule, broken, reason_from_sentence
from attn_dispatch.semantics.common_rules import DTYPE, MAX_SEGMENTS, ROW_BIAS_GRADIENT
from attn_dispatch_tools.verify.case import Case, spec_of
from tests.support.option_parts import spec_with
from tests.support.repository import ROOT

GFX942 = parse("gfx942")


def test_reasons_are_equal_by_rule_and_facts():
    reason = Reason("page_size", (("size", 64),), "pages of 64", "pages of 128")
    assert reason == Reason("page_size", (("size", 64),), "another sentence")
    assert hash(reason) == hash(Reason("page_size", (("size", 64),)))
    assert reason != Reason("page_size", (("size", 8),), "pages of 64", "pages of 128")
    assert reason != Reason("pages", (("size", 64),), "pages of 64", "pages of 128")
    assert str(reason) == "pages of 64"
    assert reason.with_remedy == "pages of 64 (remedy: pages of 128)"
    assert replace(reason, remedy="").with_remedy == "pages of 64"
    noted = reason.where("in the backward pass", ("direction", "backward"))
    assert noted != reason and noted.rule == reason.rule and noted.remedy == reason.remedy
    assert str(noted) == "pages of 64 (in the backward pass)"


def test_sentences_with_different_numbers_have_the_same_rule():
    one, other = (reason_from_sentence("toy", f"up to {x} keys") for x in (4_096, 77))
    assert (
        one != other
        and one.rule == other.rule != reason_from_sentence("toy", "up to some keys").rule
    )
    assert one.rule != reason_from_sentence("other", str(one)).rule


def test_broken_gives_a_reason_for_each_rule_that_applies():
    rules = (
        Rule[int]("odd", lambda x: x % 2 == 1, "{x} is odd", "add 1", facts=lambda x: {"x": x}),
        Rule[int]("large", lambda x: x > 9, "large", lambda x: f"subtract {x - 9}"),
    )
    assert broken(rules, 4) == ()
    odd, large = broken(rules, 11)
    assert (odd, str(odd), odd.remedy) == (Reason("odd", (("x", 11),)), "11 is odd", "add 1")
    assert large.with_remedy == "large (remedy: subtract 2)"


TABLES: dict[str, tuple[Any, ...]] = {
    "cudnn": cudnn_rules._RULES,
    "cudnn, a variant": cudnn_rules._VARIANT_RULES,
    "flash": (DTYPE, MAX_SEGMENTS, *flash_rules._RULES, *flash_rules._WRONG_CORNER),
    "fa4": (*fa4_rules.RULES, fa4_rules._COMPILED),
    "fa4, tangents": (fa4_tangents._COMPILED,),
    "fa4, wide": (fa4_wide._WINDOW, fa4_wide._CORNER, fa4_wide._COMPILED),
    "aiter": aiter_call_rules.CALL_RULES,
    "aiter, asm": asm_rules_of(DEV18),
    "aiter, asm alone": asm_rules_of(Release("v0.1.15", (0, 1, 15))),
    "aiter, ck": aiter_rules.CK_RULES,
    "aiter, split": aiter_rules.SPLIT_RULES,
    "xla": xla._RULES,
}


@pytest.mark.parametrize("table", TABLES)
def test_the_rules_of_a_table_have_distinct_names(table: str):
    assert not [x for x, n in Counter(rule.name for rule in TABLES[table]).items() if n > 1]


def test_a_rule_named_after_an_implementation_is_in_its_tables_alone():
    """Implementations share only rules whose names name none of them."""
    found: dict[str, set[str]] = {}
    for table, rules in TABLES.items():
        for rule in rules:
            found.setdefault(rule.name, set()).add(table.split(",")[0])
    shared = {name for name, vendors in found.items() if len(vendors) > 1}
    assert all("/" not in name or name.startswith("feature/") for name in shared), shared
    for name, vendors in found.items():
        owner = name.split("/")[0]
        assert "/" not in name or owner in ("feature", *vendors), name


@pytest.mark.parametrize("module", [cudnn, flash, fa4, aiter, xla], ids=lambda x: x.NAME)
def test_not_supported_reasons_are_distinct_reasons(module: ModuleType):
    spec = spec_of(Case("call", dtype="float32", sinks=1, alibi=1).forward_options(),
                   Case("call", dtype="float32", sinks=1, alibi=1).avals())  # fmt: skip
    for device in (parse("sm90"), GFX942, parse("cpu")):
        reasons = module.not_supported_reasons(spec, device)
        assert isinstance(reasons, tuple) and all(isinstance(x, Reason) for x in reasons)
        assert all(x.rule and str(x) and hash(x) is not None for x in reasons)
        assert len(set(reasons)) == len(reasons)


def test_rules_have_a_remedy_unless_only_xla_helps():
    """Only XLA helps against a kernel's limits; those rules have no remedy."""
    without = {rule.name for rule in cudnn_rules._RULES if not rule.remedy}
    assert without == {"empty", "cudnn/widest_head", "cudnn/int32_length"}
    for rules in TABLES.values():
        for rule in rules:
            assert not str(rule.remedy).startswith("none"), rule.name
    for name in ("feature/mask", "aiter/bias_and_alibi", "feature/local_window_size as an array",
                 "dropout_keys", "bias_dtype", "dtype"):  # fmt: skip
        (rule,) = (x for x in aiter_call_rules.CALL_RULES if x.name == name)
        assert rule.remedy, name


def cudnn_rule(name: str) -> Rule:
    (rule,) = (x for x in cudnn_rules._RULES if x.name == name)
    return rule


def spec_for(**facts: Any) -> Any:
    case = Case("call", **facts)
    return spec_of(case.forward_options(), case.avals())


def test_the_top_left_mask_is_no_remedy_with_query_lengths():
    band = {"is_causal": True, "alignment": "bottom_right", "bias": (1, 1, 64, 64)}
    rule = cudnn_rule("cudnn/bottom_right")
    with_lengths = spec_for(t=64, s=64, q_lengths=(1, 0.5), **band)
    assert rule.applies(with_lengths)
    remedy = rule.reason(with_lengths).remedy
    assert "top-left" not in remedy and "mask" in remedy


def test_stop_gradient_is_the_remedy_for_a_row_bias_whose_gradient_is_0():
    def remedy(**facts: Any) -> str:
        case = Case("call", t=8, s=8, bias=(1, 1, 8, 1), **facts)
        forward = spec_of(case.forward_options(), case.avals())
        wanted = ("query", "bias")
        options = backward_options(forward.options, wanted, has_lse_grad=case.lse_grad)
        backward = forward.backward(options)
        assert ROW_BIAS_GRADIENT.applies(backward)
        return ROW_BIAS_GRADIENT.reason(backward).remedy

    assert remedy() == "pass jax.lax.stop_gradient(bias): its gradient is 0"
    assert remedy(sinks=1) == remedy(lse_grad=True) == ""


# Rules and facts.


def test_rules_are_made_from_sentences_of_cudnn_and_other_packages_alone():
    folder = Path(attn_dispatch.__file__).parent
    callers = {
        path.relative_to(folder).as_posix(): re.findall(r"reason_from_sentence\(\s*(\S+?),", text)
        for path in folder.rglob("*.py")
        if path.name != "reason.py" and "reason_from_sentence(" in (text := path.read_text())
    }
    assert set(callers.pop("devices/from_packages.py")) == {"self.NAME"}
    assert callers == {"cudnn/__init__.py": ['"cudnn/engine"', '"cudnn/plan"']}


def test_a_refused_mod_is_one_rule_in_whatever_file():
    def refusal(file: str, added: int) -> Reason:
        names: dict[str, Any] = {"jax": jax}
        source = f"def mod(score, b, n, t, s): return jax.lax.erf_inv(score + {added})"
        exec(compile(source, file, "exec"), names)
        program = trace("score_mod", names["mod"], (), "float32").program
        found = kernel_program(ScoreRules(score_mod=program), Pairs((8, 8)), is_backward=False)
        assert isinstance(found, Reason)
        return found

    one, other = refusal("/home/model.py", 1), refusal("/home/other.py", 2)
    assert one.rule == other.rule == "cudnn/mods/score_mod/operation"
    assert "(at model.py:1)" in str(one) and "(at other.py:1)" in str(other) and one != other


def plain_call() -> CudnnCall:
    case = Case("plain")
    return next(iter(variants_of(spec_of(case.forward_options(), case.avals()))))


def test_each_known_bug_of_cudnn_is_a_rule():
    source = (ROOT / "cuda_backend" / "known_bad.cc").read_text()
    table = source[source.index("kTable[]") : source.index("known_bad_reasons")]
    names = re.findall(r'^    \{"(\w+)", ', table, re.MULTILINE)
    assert len({*names}) == len(names) == table.count("[](const SdpaSpec&") > 20

    call = plain_call()

    def rule(*found: str, version: int = 91900) -> str:
        lines = (f"known bug {name} of cuDNN {version}: it fails (measured)" for name in found)
        return cudnn._planning_reason("; ".join(lines), "9.19.0", call).rule

    assert [rule(x) for x in names] == [f"cudnn/known_bug/{x}" for x in names]
    assert rule(names[0]) == rule(names[0], version=92800)
    assert rule(*names[:2]) == f"cudnn/known_bug/{names[0]} and {names[1]}"
    assert cudnn._planning_reason("cuDNN refuses the graph: no", "9.19.0", call).rule.startswith(
        "cudnn/plan: "
    )


def test_cudnns_condition_is_preceded_by_a_sentence_of_ours():
    call = plain_call()
    error = "cuDNN has no engine for it: kcfg.cta_tile.M != 64 || kcfg.cta_tile.N != 64"
    of_any = cudnn._planning_reason(error, "9.28.1", call)
    assert str(of_any) == (
        "this combination of options: no engine of cuDNN 9.28.1 computes it on this device "
        f"({error})"
    )
    trained = replace(call, backward=True, needs_dbias=True, dropout_rate=0.1)
    reason = cudnn._planning_reason(error, "9.28.1", trained)
    assert reason.rule == "cudnn/no_engine/dropout with the gradient of bias"


def test_the_number_that_decides_is_a_fact_and_in_the_sentence():
    def cudnn_reason(name: str, **facts: Any) -> Reason:
        return cudnn_rule(name).reason(spec_for(**facts))

    one, other = (cudnn_reason("cudnn/widest_head", h=h) for h in (3000, 9000))
    assert one != other and "3,000" in str(one) and "9,000" in str(other)
    one, other = (cudnn_reason("cudnn/scale", scale=x) for x in (1e-40, 1e38))
    assert one != other and "1e-40" in str(one) and "1e+38" in str(other)
    one, other = (cudnn_reason("cudnn/int32_length", t=x, s=8) for x in (2**31, 2**32))
    assert one != other and f"{2**31:,} and 8" in str(one)
    (rule,) = (x for x in aiter_call_rules.CALL_RULES if x.name == "aiter/alibi_lengths")
    one, other = (rule.reason(spec_for(t=x, s=8, alibi=1)) for x in (2**16, 2**17))
    assert one != other and "65,536 queries and 8 keys" in str(one)


# Remedies.


SEGMENTS: dict[str, Any] = {x: ((1,) * 32 + (2,) * 32,) * 2 for x in ("q_segments", "kv_segments")}


def with_mods(spec: Any, **mods: Any) -> Any:
    return spec_with(spec, **{x: trace(x, y, (), "float32").program for x, y in mods.items()})


def may_be_nan(score: Any, *_: Any) -> Any:
    return score / score


def test_the_remedy_against_a_scale_does_not_overflow():
    def remedy(**facts: Any) -> str:
        return cudnn_rule("cudnn/scale").reason(spec_for(**facts)).remedy

    assert remedy(scale=1e38, dtype="float16") == ""
    for facts in ({"scale": 1e38, "dtype": "bfloat16"}, {"scale": 1e-40, "dtype": "float16"}):
        assert f"if {facts['dtype']} holds the product" in remedy(**facts)


def test_remedies_of_masks_and_mods_lead_to_no_other_refusal():
    mask = with_mods(
        spec_for(mask=(2, 1, 256, 256), b=2, t=256, s=256, dtype="float16"), score_mod=may_be_nan
    )
    (reason,) = cudnn_rules.not_supported_reasons(mask)
    assert reason.rule == "cudnn/score_mod_nan" and "mask" not in reason.remedy
    sinks = with_mods(spec_for(sinks=1, dtype="float16"), mask_mod=lambda b, n, t, s: s <= t)
    (reason,) = cudnn_rules.not_supported_reasons(sinks)
    assert reason.remedy == "pass mask instead of mask_mod"
    masked = spec_for(sinks=1, mask=(1, 1, 8, 8), t=8, s=8, dtype="float16")
    assert cudnn_rules.not_supported_reasons(masked) == ()
    (reason,) = cudnn_rules.not_supported_reasons(with_mods(sinks, score_mod=may_be_nan))
    assert reason.rule == "cudnn/sinks_mask_mod" and "pass mask" not in reason.remedy


def test_remedies_of_packed_sequences_lead_to_no_other_refusal():
    packed = {"t": 64, "s": 64, "max_segments": 2, **SEGMENTS}
    bottom_right = {"alignment": "bottom_right", "is_causal": True}
    bias = cudnn_rule("cudnn/packed_bias")
    for facts in ({"bias": (1, 1, 64, 64)}, {"mask": (1, 1, 64, 64)}):
        assert bias.reason(spec_for(**packed, **facts)).remedy == "pass a padded batch with lengths"
        padded = spec_for(t=64, s=64, q_lengths=(1, 0.5), dtype="bfloat16", **facts)
        assert cudnn_rules.not_supported_reasons(padded) == ()
        assert bias.reason(spec_for(**packed, **facts, **bottom_right)).remedy == ""
    slopes = cudnn_rule("cudnn/alibi_from_lengths")
    assert "as a bias" in slopes.reason(spec_for(alibi=1, q_lengths=(1, 0.5))).remedy
    assert slopes.reason(spec_for(**packed, alibi=1)).remedy == ""
