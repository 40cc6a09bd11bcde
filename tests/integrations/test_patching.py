"""Patches, which may be nested, ended in any order and used by several threads."""

from __future__ import annotations

import inspect
import sys
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import AttentionConventionWarning
from attn_dispatch.integrations import patch_jax_nn
from attn_dispatch.integrations.patching import Patch, Tally, original

X = np.random.default_rng(0).standard_normal((2, 5, 4, 8), np.float32)


def module_with_x() -> Any:
    module: Any = types.ModuleType("place")
    module.x = 0
    return module


def is_ours(function: Any) -> bool:
    return inspect.unwrap(function) is inspect.unwrap(attn_dispatch.dot_product_attention)


def test_a_block_replaces_jax_nn_until_its_end():
    theirs = jax.nn.dot_product_attention

    def program(x):
        return jax.nn.dot_product_attention(x, x, x, is_causal=True)

    with patch_jax_nn():
        assert is_ours(jax.nn.dot_product_attention)
        assert "attn_fwd[" in str(jax.make_jaxpr(lambda x: program(x))(X))
        assert original(jax.nn, "dot_product_attention") is theirs
        got = program(X)
    assert jax.nn.dot_product_attention is theirs
    assert "attn_fwd[" not in str(jax.make_jaxpr(lambda x: program(x))(X))
    np.testing.assert_allclose(got, program(X), atol=2e-6)


def test_start_replaces_jax_nn_until_stop():
    theirs = jax.nn.dot_product_attention
    patch = patch_jax_nn(may_be_unused=True).start()
    assert is_ours(jax.nn.dot_product_attention)
    patch.stop()
    assert jax.nn.dot_product_attention is theirs
    with pytest.raises(RuntimeError, match="expected a patch that has been started"):
        patch.stop()


def test_an_error_in_the_block_ends_the_patch():
    theirs = jax.nn.dot_product_attention
    with pytest.raises(KeyError), patch_jax_nn():
        raise KeyError
    assert jax.nn.dot_product_attention is theirs


def einsum_attention(x: Any) -> Any:
    scores = jnp.einsum("btnh,bsnh->bnts", x, x)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), x)


def test_a_block_in_which_only_einsum_attention_ran_warns_with_its_line():
    softmax = jax.nn.softmax
    with pytest.warns(AttentionConventionWarning) as given, patch_jax_nn():
        jax.jit(einsum_attention)(X)
    (message,) = [str(x.message) for x in given]
    line = inspect.getsourcelines(einsum_attention)[1] + 2
    assert message.startswith("patch_jax_nn: nothing called jax.nn.dot_product_attention")
    assert f"Seen instead: a softmax of float32[2, 4, 5, 5] at {__file__}:{line}" in message
    assert given[0].filename == __file__ and jax.nn.softmax is softmax
    with patch_jax_nn(may_be_unused=True):
        einsum_attention(X)
    with patch_jax_nn() as patch:  # both
        einsum_attention(X)
        jax.nn.dot_product_attention(X, X, X)
        assert patch.calls == 1
    with patch_jax_nn():
        jax.nn.dot_product_attention(X, X, X)
    assert patch.calls == 1


def test_a_block_in_which_nothing_ran_warns_with_early_imports(monkeypatch: pytest.MonkeyPatch):
    place, importer = module_with_x(), module_with_x()
    place.attend = importer.attend = einsum_attention
    monkeypatch.setitem(sys.modules, "importer", importer)
    monkeypatch.setattr(einsum_attention, "__module__", "place")
    tally = Tally("patch", "place.attend")

    def patch() -> Patch:
        return Patch({(place, "attend"): tally.counted(lambda x: x)}, tally)

    monkeypatch.setitem(sys.modules, "importer_again", importer)  # as __main__ and __mp_main__
    with pytest.warns(AttentionConventionWarning) as given:
        with patch():
            importer.attend(X[..., :0])
    (message,) = [str(x.message) for x in given]
    assert "; importer.attend, imported before" in message and "importer_again" not in message
    with patch(), patch():  # what goes through the inner one counts for both
        place.attend(X)
    with patch():
        pass  # perhaps a program that was traced before
    with pytest.warns(AttentionConventionWarning, match="Seen instead: a softmax of float32"):
        with patch():
            importer.attend(X)
    with pytest.raises(KeyError), patch_jax_nn():
        einsum_attention(X)
        raise KeyError  # no warning beside the error


def test_patches_end_in_any_order():
    place = module_with_x()
    first, second = Patch({(place, "x"): 1}), Patch({(place, "x"): 2})
    first.start()
    second.start()
    assert place.x == 2
    first.stop()
    assert place.x == 2
    second.stop()
    assert place.x == 0
    with first, second, first:
        assert place.x == 1
    assert place.x == 0


def test_patches_of_several_threads_all_end():
    place = module_with_x()
    seen = []

    def work(number: int) -> None:
        for _ in range(300):
            with Patch({(place, "x"): number}):
                seen.append(place.x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert place.x == 0 and 0 not in seen
