"""Settings as `with` blocks: the values they take, and the warning if one is called alone."""

from __future__ import annotations

import gc
import warnings

import pytest

import attn_dispatch
from attn_dispatch import settings

# By name: a value that is valid, and one that is wrong.
BLOCKS = {
    "fallback": ("error", "raise"),
    "sharded_dropout": ("same", "other"),
    "rewrites": (False, "no"),
    "finite_padding": (True, 1),
    "aiter_asm": (False, 0),
    "scratch_limit": ("2GB", "2 apples"),
    "tuning": (3.0, -1),
    "target": ("h100", "h1000"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_setting_called_as_a_statement_warns(name: str):
    with pytest.warns(RuntimeWarning, match=rf"write `with {name}\(\.\.\.\):` around") as caught:
        getattr(attn_dispatch, name)(BLOCKS[name][0])
        gc.collect()
    assert [x.filename for x in caught] == [__file__]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_and_decorators_apply_without_a_warning(name: str):
    before = settings.current()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block = getattr(attn_dispatch, name)(BLOCKS[name][0])
        with block:
            inside = settings.current()
        assert inside != before == settings.current()
        decorated = getattr(attn_dispatch, name)(BLOCKS[name][0])(settings.current)
        assert decorated() == decorated() == inside
        gc.collect()
    assert settings.current() == before
    with pytest.raises(RuntimeError, match=f"{name}: expected a new block"), block:
        pass


@pytest.mark.parametrize("name", BLOCKS)
def test_a_wrong_value_is_refused_before_the_block(name: str):
    with pytest.raises(ValueError, match="expected"):
        getattr(attn_dispatch, name)(BLOCKS[name][1])


def test_a_strategy_along_two_axes_says_how_to_have_it():
    hint = "; heads[+]ring takes two mesh axes: shard the heads along one .* 'ring', .* the other$"
    with pytest.raises(ValueError, match=hint):
        attn_dispatch.context_parallel("heads+ring")  # pyright: ignore[reportArgumentType]
