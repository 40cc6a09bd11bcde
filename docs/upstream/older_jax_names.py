"""A pytest plugin with names of Pallas that AXLearn's kernels use and newer JAX has elsewhere."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


def _load(ref, idx, *, mask=None, other=None, **kwargs):
    if mask is None:
        return ref[idx]
    return triton.load(ref.at[idx], mask=mask, other=other, **kwargs)


def _store(ref, idx, val, *, mask=None, **kwargs):
    triton.store(ref.at[idx], val, mask=mask, **kwargs)


def _dot(a, b, trans_a=False, trans_b=False, allow_tf32=None, precision=None):
    if allow_tf32 is not None:
        precision = jax.lax.Precision.HIGH if allow_tf32 else jax.lax.Precision.HIGHEST
    a, b = a.T if trans_a else a, b.T if trans_b else b
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


for _name, _function in (("load", _load), ("store", _store), ("dot", _dot)):
    try:
        getattr(pl, _name)
    except AttributeError:
        setattr(pl, _name, _function)
