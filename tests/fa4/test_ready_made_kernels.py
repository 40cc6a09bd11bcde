"""Kernels that are compiled with the ready-made changes of scores."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch import explain, mods
from attn_dispatch.fa4 import compiled
from attn_dispatch_tools.build_fa4 import score_mods
from tests.support.fa4_on_cpu import LIBRARY

SLOPES = jnp.ones(8)
ARRAYS = [jax.ShapeDtypeStruct((2, 64, 8, 64), jnp.bfloat16)] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"logits_soft_cap": 50.0},
        {"score_mod": mods.soft_cap(50)},
        {"score_mod": lambda x, b, n, t, s: 50 * jnp.tanh(x / 50)},
        {"alibi_slopes": SLOPES},
        {"score_mod": mods.alibi(SLOPES)},
        {"score_mod": mods.alibi(SLOPES), "mask_mod": mods.prefix_lm(jnp.asarray([3, 5]))},
        {"score_mod": mods.alibi(SLOPES), "mask_mod": mods.prefix_lm(3)},
    ],
)
def test_ready_made_kernels_run_the_arguments_and_the_mods(monkeypatch, options):
    texts = ("attn_dispatch.mods:soft_cap(50)", "attn_dispatch.mods:alibi([1.0])")
    made = [(x, y) for x in LIBRARY.sets for y in map(score_mods.variant, texts)]
    variants = [replace(x, variant=y.digest, variant_arrays=y.types) for x, y in made]
    with_mods = replace(LIBRARY, sets=(*LIBRARY.sets, *variants))
    monkeypatch.setattr(compiled, "find", lambda: with_mods)
    found = explain(*ARRAYS, implementation="fa4", target="sm90", **options)
    assert [x.reasons for x in (found.forward[0], found.backward[0])] == [(), ()]
    wrong = options | ({"logits_soft_cap": 51.0} if "logits_soft_cap" in options else {})
    if wrong != options:
        assert explain(*ARRAYS, implementation="fa4", target="sm90", **wrong).forward[0].reasons
