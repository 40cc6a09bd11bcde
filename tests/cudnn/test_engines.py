"""cuDNN's engines by name: similar ones, unknown ones, and the engine in a lowered program."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch import cudnn, dot_product_attention, explain, target
from attn_dispatch.core import select
from attn_dispatch.core.tuning import winners
from attn_dispatch.core.tuning.winners import Winner
from attn_dispatch.cudnn import engines
from attn_dispatch.devices.target import parse
from attn_dispatch.inspection import spec_of
from tests.support.backend import needs_cudnn
from tests.support.extent import EVERY_PLAN
from tests.support.option_parts import spec_with

ENGINES = json.dumps(
    {
        "proposed": ["6 A=1 B=0", "7 A=0"],
        "knobs": {"6": {"A": [0, 2, 1], "B": [0, 4, 2]}, "7": {"A": [0, 1, 1]}, "8": {}},
    }
)


def test_similar_engines_differ_in_one_knob():
    expected = ("7 A=0", "6 A=0 B=0", "6 A=2 B=0", "6 A=1 B=2", "6 A=1 B=4", "7 A=1")
    assert engines.similar_engines("", ENGINES) == expected
    one_knob_changed = {"6 A=0 B=2", "6 A=1 B=2", "6 A=2 B=0", "6 A=2 B=4"}
    found = engines.similar_engines("6 A=2 B=2", ENGINES)
    assert one_knob_changed <= set(found) and "6 A=2 B=2" not in found
    assert engines.similar_engines("9 A=1", ENGINES) == ("6 A=1 B=0", "7 A=0")
    assert engines.similar_engines("", json.dumps({"proposed": [], "knobs": {}})) == ()


SM90 = parse("sm90")
Q = jnp.zeros((2, 512, 4, 64), jnp.bfloat16)
FORWARD, BACKWARD = spec_of(query=Q, key=Q, value=Q, is_causal=True).in_training(
    ("query", "key", "value")
)


def with_engine(spec, engine):
    return replace(spec, options=replace(spec.options, engine=engine))


@needs_cudnn
@pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_some_other_engines_are_planned(spec):
    assert cudnn.not_supported_reasons(spec, SM90) == ()
    untuned = cudnn.plan(spec, SM90)
    planned = {}
    for engine in cudnn.other_engines(spec, SM90)[:: 1 if EVERY_PLAN else 4]:
        if not cudnn.not_supported_reasons(with_engine(spec, engine), SM90):
            planned[engine] = cudnn.plan(with_engine(spec, engine), SM90)
    assert len(planned) > 1
    # cuDNN's names begin with the requested engine's number and are all different.
    for engine, plan in planned.items():
        assert re.match(rf"eng{engine.split()[0]}(_|$)", plan.engine)
        assert plan.workspace_bytes >= untuned.workspace_bytes
    assert len({plan.engine for plan in planned.values()} | {untuned.engine}) == 1 + len(planned)


@needs_cudnn
@pytest.mark.parametrize("engine", ["99", "6 NOBODY=1", "six", "6 STREAM_K", "6 STREAM_K=x", "-1"])
def test_unknown_engine_gives_a_reason(engine):
    (refusal,) = cudnn.not_supported_reasons(with_engine(FORWARD, engine), SM90)
    reason = str(refusal)
    assert reason.startswith(f"engine {engine}: ")
    if engine == "6 NOBODY=1":
        assert "does not know the knob NOBODY" in reason
    elif engine != "99":
        assert 'expected words as "6 KERNEL_CFG=2 STREAM_K=1"' in reason


@needs_cudnn
def test_deterministic_backward_pass_has_no_other_engines():
    deterministic = spec_with(BACKWARD, deterministic_backward=True)
    assert cudnn.other_engines(deterministic, SM90) == ()


@needs_cudnn
def test_lowered_program_names_the_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(tmp_path / "winners.json"))
    other = next(
        x
        for x in cudnn.other_engines(FORWARD, SM90)
        if not cudnn.not_supported_reasons(with_engine(FORWARD, x), SM90)
    )
    winners.keep(
        Winner(
            call=winners.described(FORWARD), device=SM90.name, versions=select.versions(SM90),
            implementation="cudnn", engine=other, date="2026-11-24", untuned="cudnn",
            microseconds={f"cudnn {other}": 10.0, "cudnn": 11.0},
        )
    )  # fmt: skip
    with target("sm90"):
        attend = jax.jit(lambda q: dot_product_attention(q, q, q, is_causal=True))
        text = attend.trace(Q).lower(lowering_platforms=("cuda",)).as_text()
        explained = str(explain(Q, Q, Q, is_causal=True))
    assert f'engine = "{other}"' in text
    assert f"tuned:     cudnn {other} 10.0 µs (cudnn 11.0), 2026-11-24" in " ".join(
        explained.replace("tuned:     ", "tuned:_____").split()
    ).replace("tuned:_____", "tuned:     ")
