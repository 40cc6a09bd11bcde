"""Packed rows give the loss and the gradients of the same documents one by one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="flax missing: pip install flax optax")
pytest.importorskip("optax", reason="optax missing: pip install flax optax")

from .drawn_documents import drawn
from .model import Config
from .packing import NO_TARGET, Rows, Shape, batches, packed, padded
from .step import Trainer

CONFIG = Config(
    layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=48, vocabulary=256
)  # fmt: skip
SHAPE = Shape(rows=3, row_length=40, max_segments=8, max_documents=10)


@functools.cache
def trainer_and_params(config: Config = CONFIG):
    trainer = Trainer.new(config, 1e-3, 10)
    return trainer, trainer.initial(config, 0).params


@functools.cache
def gradient(config: Config = CONFIG):
    """(params, rows, max_segments) -> loss and gradients, jitted."""
    return jax.jit(jax.value_and_grad(trainer_and_params(config)[0].loss), static_argnums=2)


def batch(seed: int = 11):
    return next(batches(drawn(seed), SHAPE, seed))


def one_by_one(documents):
    """Loss and gradients with each document alone in an unpadded row."""
    trainer, params = trainer_and_params()

    @jax.jit
    @jax.value_and_grad
    def summed(params, tokens):
        rows = Rows(
            tokens, jnp.roll(tokens, -1, 1).at[:, -1].set(NO_TARGET), jnp.ones_like(tokens),
            jnp.arange(tokens.shape[1])[None],
        )  # fmt: skip
        return trainer.loss(params, rows, 1) * (tokens.shape[1] - 1)

    count = sum(len(x) - 1 for x in documents)
    found = [summed(params, np.asarray(x, np.int32)[None]) for x in documents]
    return jax.tree.map(lambda *x: sum(x) / count, *found)


def assert_alike(one, other, tolerance=1e-5):
    """Each array within `tolerance` of its largest number."""
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True
    ):
        gap, size = np.abs(np.asarray(x) - np.asarray(y)).max(), np.abs(np.asarray(y)).max()
        assert gap <= tolerance * size, f"{jax.tree_util.keystr(path)}: {gap / size:.2g}"


def test_packed_is_padded_is_one_by_one():
    made = batch()
    params = trainer_and_params()[1]
    from_packed = gradient()(params, packed(made, SHAPE), SHAPE.max_segments)
    assert_alike(from_packed, gradient()(params, padded(made, SHAPE), 1))
    few = dataclasses.replace(made, documents=made.documents[:3], rows=made.rows[:3])
    from_few = gradient()(params, packed(few, SHAPE), SHAPE.max_segments)
    assert_alike(from_few, one_by_one(few.documents))


@pytest.mark.parametrize("seed", [21, 22, 23])
def test_packed_is_padded_for_other_documents(seed):
    made, params = batch(seed), trainer_and_params()[1]
    from_packed = gradient()(params, packed(made, SHAPE), SHAPE.max_segments)
    assert_alike(from_packed, gradient()(params, padded(made, SHAPE), 1))


def _borders_off_by_one(rows: Rows) -> Rows:
    """Each document begins a token late: its first token has the id of the document before."""
    ids = np.asarray(rows.segment_ids)
    late = np.concatenate([ids[:, :1], ids[:, :-1]], axis=1)
    return dataclasses.replace(rows, segment_ids=np.where(ids, late, 0))


def _one_document(rows: Rows) -> Rows:
    return dataclasses.replace(rows, segment_ids=(np.asarray(rows.segment_ids) > 0).astype(int))


def _targets_across_borders(rows: Rows) -> Rows:
    tokens = np.asarray(rows.tokens)
    following = np.concatenate([tokens[:, 1:], np.full((len(tokens), 1), NO_TARGET)], axis=1)
    return dataclasses.replace(rows, targets=np.where(rows.segment_ids, following, NO_TARGET))


def _positions_that_stand_still(rows: Rows) -> Rows:
    return dataclasses.replace(rows, positions=np.zeros_like(rows.positions))


@pytest.mark.parametrize(
    "spoil",
    [_borders_off_by_one, _one_document, _targets_across_borders, _positions_that_stand_still],
)
def test_rows_that_are_wrong_are_noticed(spoil):
    made, params = batch(), trainer_and_params()[1]
    expected = gradient()(params, padded(made, SHAPE), 1)
    found = gradient()(params, spoil(packed(made, SHAPE)), SHAPE.max_segments)
    with pytest.raises(AssertionError):
        assert_alike(found, expected, tolerance=1e-3)


def test_rotary_positions_are_relative():
    """Positions that do not restart in each document only change the rounding, so that only
    test_packing.py can notice them."""
    made, params = batch(), trainer_and_params()[1]
    rows = packed(made, SHAPE)
    along = np.broadcast_to(np.arange(SHAPE.row_length, dtype=np.int32), rows.positions.shape)
    found = gradient()(params, dataclasses.replace(rows, positions=along), SHAPE.max_segments)
    assert_alike(found, gradient()(params, rows, SHAPE.max_segments), tolerance=1e-4)


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_remat_changes_nothing(remat):
    made, params = batch(), trainer_and_params()[1]
    config = dataclasses.replace(CONFIG, remat=remat)
    rows = packed(made, SHAPE)
    found = gradient(config)(params, rows, SHAPE.max_segments)
    assert_alike(found, gradient()(params, rows, SHAPE.max_segments))
