"""A pytest plugin: names of Pallas that AXLearn's kernels use and that newer JAX has elsewhere."""

from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


def _load(ref, idx, *, mask=None, other=None, **kwargs):
    if mask is None:
        return ref[idx]
    return triton.load(ref.at[idx], mask=mask, other=other, **kwargs)


def _store(ref, idx, val, *, mask=None, **kwargs):
    triton.store(ref.at[idx], val, mask=mask, **kwargs)


for _name, _function in (("load", _load), ("store", _store)):
    try:
        getattr(pl, _name)
    except AttributeError:
        setattr(pl, _name, _function)
