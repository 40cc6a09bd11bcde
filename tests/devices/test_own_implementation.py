"""A third-party package adds an implementation, as examples/own_implementation does."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, explain, fallback
from attn_dispatch.call.features import FEATURES, features_of
from attn_dispatch.core import select
from attn_dispatch.devices.from_packages import GROUP, FromPackage, installed
from attn_dispatch.devices.implementation import Plan
from attn_dispatch.devices.target import CPU
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.cases import CASES
from tests.support.repository import ROOT

_TOY = ROOT / "examples/own_implementation"
Q = jnp.asarray(np.random.default_rng(0).normal(size=(2, 10, 4, 8)), jnp.float32)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that installs a package, given its module's text and its entry point."""

    def install(text: str, entry: str) -> None:
        (tmp_path / "their_attention.py").write_text(text)
        metadata = tmp_path / "their_attention-1.2.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: their-attention\nVersion: 1.2\n"
        )
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{entry}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "their_attention", raising=False)
        importlib.invalidate_caches()
        installed.cache_clear()
        jax.clear_caches()  # earlier calls were lowered without it

    yield install
    installed.cache_clear()


def install_toy(package) -> None:
    package((_TOY / "toy_attention.py").read_text(), "toy = their_attention")


def test_third_party_implementation_is_chosen_and_computes(package):
    install_toy(package)
    assert select.names() == ("cudnn", "flash", "fa4", "aiter", "toy", "xla")
    explanation = explain(Q, Q, Q, is_causal=True)
    assert (explanation.chosen_forward, explanation.chosen_backward) == ("toy", "toy")
    assert ("their-attention", "1.2") in explanation.versions

    def gradient(name: str) -> jax.Array:
        def loss(q: jax.Array) -> jax.Array:
            out = dot_product_attention(q, q, q, is_causal=True, implementation=name)
            return (out**2).sum()

        return jax.grad(loss)(Q)

    np.testing.assert_allclose(gradient("toy"), gradient("xla"), rtol=1e-4, atol=1e-5)


def test_features_that_it_does_not_list_are_refused_or_rewritten(package, recwarn):
    install_toy(package)
    ids = jnp.ones((2, 10), jnp.int32)
    explanation = explain(Q, Q, Q, query_segment_ids=ids, dropout_rate=0.5,
                          dropout_key=jax.random.key(0), implementation="toy")  # fmt: skip
    reasons = {*map(str, explanation.forward[0].reasons)}
    assert reasons > {"segment ids: toy has none", "dropout: toy has none"}
    assert any(x.startswith("bias: toy has none (of the call as rewritten: ") for x in reasons)
    explanation = explain(Q, Q, Q, sinks=jnp.zeros(4))
    assert explanation.chosen_forward == "toy"
    assert explanation.forward[4].rewrites == ("sinks: put into out and lse afterwards",)


@pytest.mark.parametrize(
    ("text", "entry", "reason"),
    [
        ("1 / 0", "toy = their_attention", "ZeroDivisionError: division by zero"),
        ("NAME = 'toy'", "toy = their_attention", "lacks PLATFORM, FEATURES, not_"),
        (None, "other = their_attention", "their_attention calls itself 'toy'"),
        (None, "toy = nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
    ],
)  # fmt: skip
def test_broken_package_is_reported_as_a_reason(package, recwarn, text, entry, reason):
    package(text or (_TOY / "toy_attention.py").read_text(), entry)
    explanation = explain(Q, Q, Q)
    assert explanation.chosen_forward == "xla" and not recwarn.list
    (verdict,) = (x for x in explanation.forward if x.implementation == entry.split()[0])
    assert str(verdict.reasons[0]).startswith("its package their-attention cannot be used: ")
    assert reason in str(verdict.reasons[0])
    out = dot_product_attention(Q, Q, Q)
    assert out.shape == Q.shape and not recwarn.list


TOY = (_TOY / "toy_attention.py").read_text()
REASONS = "\n\ndef not_supported_reasons(spec, device):\n    return "


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        (REASONS + "None", "not_supported_reasons: expected sentences or Reasons, got None"),
        (REASONS + "'too wide'", "expected sentences or Reasons, got 'too wide'"),
        (REASONS + "1 / 0", "toy: not_supported_reasons failed: ZeroDivisionError: division by"),
        ("\nFEATURES = 'bias'", "FEATURES: expected a tuple of names, got 'bias'"),
        ("\nFEATURES = None", "FEATURES: expected a tuple of names, got None"),
        ("\nPLATFORM = None", "PLATFORM: expected one of ('cuda', 'rocm', 'cpu'), got None"),
        ("\nimport sys\nsys.exit('no driver')", "SystemExit: no driver"),
        ("\n\ndef unusable_reason(device):\n    1 / 0", "toy: unusable_reason failed: ZeroDiv"),
    ],
)  # fmt: skip
def test_mistake_in_the_package_does_not_break_calls(package, recwarn, added: str, reason: str):
    package(TOY + added, "toy = their_attention")
    explanation = explain(Q, Q, Q)
    (verdict,) = (x for x in explanation.forward if x.implementation == "toy")
    assert reason in str(verdict.reasons[0]) and explanation.chosen_forward == "xla"
    rules = {"toy/package", "toy/not_supported_reasons", "toy/unusable_reason"}
    assert verdict.reasons[0].rule in rules
    assert dot_product_attention(Q, Q, Q).shape == Q.shape and not recwarn.list


def test_wrong_results_raise_with_expected_and_given(package):
    package(TOY.replace("out.astype(spec.dtype)", "out[0]", 1), "toy = their_attention")
    wrong = r"toy: forward: expected out as \['float32\[2, 10, 4, 8\]'\], got \['float32\[10, 4, 8"
    with pytest.raises(TypeError, match=wrong):
        dot_product_attention(Q, Q, Q)


def test_call_that_the_package_never_ran_is_no_fallback(package, recwarn):
    install_toy(package)
    with fallback("error"):
        dot_product_attention(Q, Q, Q, key_value_seq_lengths=jnp.array([3, 5]))
        jax.jvp(lambda q: dot_product_attention(q, Q, Q), (Q,), (Q,))
    assert not recwarn.list


def test_built_in_name_cannot_be_taken(package):
    package((_TOY / "toy_attention.py").read_text(), "xla = their_attention")
    assert select.names() == ("cudnn", "flash", "fa4", "aiter", "xla")


def test_named_cases_cover_every_feature():
    found = set()
    arrays = Case("window", window_arrays=((3, 2),)), Case("offset", window=(3, 0), offset=2)
    for case in (*CASES, *arrays):
        spec = spec_of(case.forward_options(needs_keep=case.dropout > 0), case.avals())
        in_pages = {"key and value in pages": case.page}
        in_pages["key and value in one pool of pages"] = case.one_pool
        found |= {*features_of(spec), *(name for name, has in in_pages.items() if has)}
        if not case.inference:
            found |= {*features_of(spec.backward(case.backward_options()))}
    assert found == {*FEATURES}


def test_package_without_features_refuses_every_feature():
    module = SimpleNamespace(FEATURES=(), not_supported_reasons=lambda spec, device: (),
                             plan=lambda spec, device: Plan("none", 0))  # fmt: skip
    entry = EntryPoint("none", "nothing", GROUP)
    extra = FromPackage(entry, module)
    extra.PLATFORM = CPU.platform
    for case in CASES[::7]:
        spec = spec_of(case.forward_options(), case.avals())
        reasons = extra.not_supported_reasons(spec, CPU)
        assert [str(x).split(":")[0] for x in reasons] == [*features_of(spec)]


def test_verify_command_checks_the_package(package, tmp_path):
    """The command as the package's author runs it, with named cases and drawn ones."""
    install_toy(package)
    options = "--implementation toy --jobs 1 --random 40 --seed 5 --cases plain/* --out".split()
    command = (sys.executable, "-m", "attn_dispatch", "verify", *options, str(tmp_path))
    paths = os.pathsep.join((str(tmp_path), *sys.path))
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " 0 failed, 0 crashed" in (next(tmp_path.glob("verify-toy-*.md"))).read_text()


def test_docs_page_shows_the_example_and_every_feature():
    page = (ROOT / "docs/implementations.md").read_text()
    assert (_TOY / "toy_attention.py").read_text() in page
    assert all(f"`{x}`" in page for x in FEATURES)
