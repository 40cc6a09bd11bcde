"""Every name of JAX's that is not public, in one place: a JAX without one of them says which.

Tried with JAX 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.sharding import NamedSharding


class UnsupportedJax(ImportError):
    """This JAX lacks something that the library needs."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"attn_dispatch needs {what}, which JAX {jax.__version__} does not have; "
            "it was tried with JAX 0.10.2 to 0.12.0"
        )


try:
    from jax.interpreters import ad, batching, mlir
except ImportError as error:
    raise UnsupportedJax("jax.interpreters.ad, batching and mlir") from error

try:
    from jax._src.dispatch import apply_primitive, prim_requires_devices_during_lowering
except ImportError as error:
    raise UnsupportedJax(
        "apply_primitive and prim_requires_devices_during_lowering in jax._src.dispatch"
    ) from error

try:
    from jax.experimental.xla_metadata import set_xla_metadata
except ImportError as error:
    raise UnsupportedJax("jax.experimental.xla_metadata") from error

try:
    from jax.experimental.custom_partitioning import custom_partitioning
except ImportError as error:
    raise UnsupportedJax("jax.experimental.custom_partitioning") from error

__all__ = [
    "UnsupportedJax",
    "ad",
    "batching",
    "custom_partitioning",
    "is_export",
    "lower_as",
    "lower_typed_as",
    "mlir",
    "number_of_devices",
    "platforms_of",
    "run_eagerly",
    "set_xla_metadata",
    "sharded_like",
    "tell_devices_to_lowering_of",
    "varying_axes",
]


def tell_devices_to_lowering_of(primitive: Primitive) -> None:
    """Let the lowering of this primitive ask for the devices, as custom_partitioning does.

    JAX tells them only to primitives that it knows to ask, and there is no public way to say so.
    """
    prim_requires_devices_during_lowering.add(primitive)


def run_eagerly(primitive: Primitive) -> None:
    """Compile and run this primitive outside of `jit`, and where `jax.disable_jit` is in force.

    A `jax.jit` of its own would bind the primitive again there, without end.
    """
    primitive.def_impl(partial(apply_primitive, primitive))


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes of a surrounding shard_map along which an array or aval differs."""
    return _manual_axis_type(jax.typeof(x)).varying


def sharded_like(x: jax.ShapeDtypeStruct, sharding: NamedSharding, aval: Any) -> ShapedArray:
    """The type of an array of this shape and sharding that varies over shard_map's axes as aval."""
    manual = _manual_axis_type(aval)
    return ShapedArray(x.shape, x.dtype, sharding=sharding, manual_axis_type=manual)


def platforms_of(context: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule's context lowers for."""
    return tuple(context.platforms or context.module_context.platforms)


def lower_as(function: Any, context: Any, operands: Any) -> Any:
    """Lower a primitive as this JAX function of its operands.

    Shardings that are part of types (Explicit mesh axes, shard_map's varying axes) end here: what
    follows is the partitioner's business.
    """
    plain = [ShapedArray(aval.shape, aval.dtype) for aval in context.avals_in]
    return mlir.lower_fun(function)(context.replace(avals_in=plain), *operands)


def is_export(context: Any) -> bool:
    """Whether a lowering rule's context lowers for `jax.export`."""
    return bool(context.module_context.lowering_parameters.for_export)


def number_of_devices(context: Any) -> int:
    """The number of devices that a lowering rule's context lowers for."""
    return int(getattr(context.module_context.axis_context, "num_devices", 1))


def lower_typed_as(function: Any, context: Any, operands: Any) -> Any:
    """Lower a primitive as this JAX function of its operands, types as they are."""
    return mlir.lower_fun(function)(context, *operands)


def _manual_axis_type(aval: Any) -> Any:
    try:
        return aval.mat
    except AttributeError as error:
        raise UnsupportedJax("the attribute `mat` of jax.core.ShapedArray") from error
