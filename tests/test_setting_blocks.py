"""Settings as `with` blocks: the values they take, and the warning if one is called alone."""

from __future__ import annotations

import gc
import warnings

import pytest

import attn_dispatch
from attn_dispatch import settings

# By name, a value.
BLOCKS = {
    "fallback": "error",
    "sharded_dropout": "same",
    "rewrites": False,
    "finite_padding": True,
    "aiter_asm": False,
    "scratch_limit": "2GB",
    "tuning": 3.0,
    "target": "h100",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_setting_called_as_a_statement_warns(name: str):
    with pytest.warns(RuntimeWarning, match=rf"write `with {name}\(\.\.\.\):` around") as caught:
        getattr(attn_dispatch, name)(BLOCKS[name])
        gc.collect()
    assert [x.filename for x in caught] == [__file__]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_and_decorators_apply_without_a_warning(name: str):
    before = settings.current()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block = getattr(attn_dispatch, name)(BLOCKS[name])
        with block:
            inside = settings.current()
        assert inside != before == settings.current()
        decorated = getattr(attn_dispatch, name)(BLOCKS[name])(settings.current)
        assert decorated() == decorated() == inside
        gc.collect()
    assert settings.current() == before
    with pytest.raises(RuntimeError, match=f"{name}: expected a new block"), block:
        pass
