"""The halves of documents on a device, and what rows and keys of a step have as ids."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.core.context.documents import Documents

IDS = np.array([[0, 0, 1, 1, 3, 3, 3, 3, 0], [1, 1, 1, 1, 2, 2, 0, 4, 4]], np.int32)
FIRST = np.array([[0, 0, 1, 0, 3, 3, 0, 0, 0], [1, 1, 0, 0, 2, 0, 0, 4, 0]])
SECOND = np.array([[0, 0, 0, 1, 0, 0, 3, 3, 0], [0, 0, 1, 1, 0, 2, 0, 0, 4]])


@pytest.mark.parametrize("is_earlier", [True, False])
def test_halves_that_attend_to_each_other_keep_their_ids(is_earlier: bool):
    found = Documents.in_halves(jnp.asarray(IDS)).ids_of_step(is_earlier=jnp.asarray(is_earlier))
    np.testing.assert_array_equal(found["query_segment_ids"], IDS if is_earlier else SECOND)
    np.testing.assert_array_equal(found["key_value_segment_ids"], FIRST if is_earlier else IDS)


def test_documents_without_equal_halves_are_invalid():
    ids = jnp.array([1, 1, 2, 2, 2, 0, 3, 3])
    assert Documents.in_halves(ids).ids.tolist() == [1, 1, -1, -1, -1, 0, 3, 3]
