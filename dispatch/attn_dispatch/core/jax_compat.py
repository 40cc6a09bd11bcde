"""All private names of JAX that the library uses. If JAX lacks one, the error names it.

Tried with JAX 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast  # noqa: TID251  # MLIR's values

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Primitive
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Traced

from attn_dispatch.typed_jax import JaxClient

if TYPE_CHECKING:
    from jax.sharding import ManualAxisType


class UnsupportedJax(ImportError):
    """The installed JAX lacks something that the library needs."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"attn_dispatch needs {what}, which JAX {jax.__version__} does not have; "
            "it was tried with JAX 0.10.2 to 0.12.0"
        )


@contextmanager
def _needed(what: str) -> Generator[None]:
    """A block that takes something from JAX. If JAX lacks it, the error names it."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnsupportedJax(what) from error


with _needed("jax.interpreters.ad, batching and mlir"):
    from jax.interpreters import ad as ad
    from jax.interpreters import batching as batching
    from jax.interpreters import mlir

with _needed("dce_jaxpr and partial_eval_jaxpr_custom_rules in jax.interpreters.partial_eval"):
    from jax.interpreters import partial_eval

    _dce_jaxpr = cast("Callable[..., tuple[Jaxpr, object]]", partial_eval.dce_jaxpr)
    partial_eval_rules = cast(
        "dict[Primitive, Callable[..., object]]", partial_eval.partial_eval_jaxpr_custom_rules
    )

with _needed("rules in jax._src.interpreters.remat, and what policies return"):
    from jax._src.core import mem_kind_to_space
    from jax._src.interpreters import remat
    from jax._src.interpreters.partial_eval import Offloadable, SaveableType

    _space_of = cast("Callable[[str], Any]", mem_kind_to_space)
    _remat_rules = cast("dict[Primitive, Callable[..., object]]", remat.rules)

with _needed("apply_primitive in jax._src.dispatch"):
    from jax._src import dispatch

    apply_primitive = cast("Callable[..., object]", dispatch.apply_primitive)

with _needed("ShardingContext in jax._src.sharding_impls"):
    from jax._src.sharding_impls import ShardingContext

with _needed("name_p in jax._src.ad_checkpoint"):
    from jax._src.ad_checkpoint import name_p as name_p

with _needed("error_checks and nan_error_check in jax._src.checkify"):
    from jax._src import checkify

    error_checks = cast("dict[Primitive, Callable[..., object]]", checkify.error_checks)
    nan_error_check = cast("Callable[..., object]", checkify.nan_error_check)

with _needed("jax.experimental.jet.jet_rules"):
    from jax.experimental import jet

    jet_rules = cast("dict[Primitive, Callable[..., object]]", jet.jet_rules)

with _needed("jax.experimental.xla_metadata"):
    from jax.experimental import xla_metadata

    set_xla_metadata = cast(
        "Callable[..., AbstractContextManager[object]]", xla_metadata.set_xla_metadata
    )

with _needed("jax.experimental.custom_partitioning"):
    from jax.experimental.custom_partitioning import custom_partitioning as custom_partitioning

with _needed("jaxlib.mlir"):
    from jaxlib.mlir import ir
    from jaxlib.mlir import passmanager as passmanager
    from jaxlib.mlir.dialects import func
    from jaxlib.mlir.dialects import sdy as sdy
    from jaxlib.mlir.dialects import stablehlo as stablehlo

with _needed("merge_mlir_modules in jax.interpreters.mlir"):
    merge_modules = cast("Callable[..., str]", mlir.merge_mlir_modules)

try:
    from jax._src.cudnn import fused_attention_stablehlo as _cudnn_of_jax
except ImportError:  # needed only to explain programs that call jax.nn's cuDNN attention
    _cudnn_of_jax = None

Context = mlir.LoweringRuleContext
"""The context that a lowering rule gets beside the operands."""

MlirValues: TypeAlias = Sequence[Any]
"""The operands or results of a primitive that is lowered. jaxlib's types for MLIR are generics
without arguments, and only JAX looks into these values."""


def run_eagerly(primitive: Primitive) -> None:
    """Have JAX compile and run this primitive outside of `jit`, and under `jax.disable_jit`.

    Under `jax.disable_jit`, a `jax.jit` here would bind the primitive again without end.
    """
    primitive.def_impl(partial(apply_primitive, primitive))


RematPolicy = Callable[..., object]
"""A policy of `jax.checkpoint`."""

Split = tuple[Sequence[jax.Array], object, Callable[..., Sequence[jax.Array]]]
"""The results of a primitive under `jax_remat3`, a pytree of what is saved, and the function of
that and the operands that returns the results for the backward pass."""


def set_remat_rule(primitive: Primitive, split: Callable[..., Split]) -> None:
    """Give a primitive its rule for `jax_remat3`.

    Args:
      primitive: the primitive.
      split: takes the policy, None where nothing is saved, the operands, and the parameters.
    """

    def rule(given: Any, *operands: jax.Array, **params: object) -> tuple[object, ...]:
        return _split_as_jax(*split(_policy_of(given), *operands, **params))

    _remat_rules[primitive] = rule


@dataclass(frozen=True)
class Saving:
    """How an array is saved for the backward pass."""

    away: Callable[[jax.Array], jax.Array]
    back: Callable[[jax.Array], jax.Array]


def saving_by(
    policy: RematPolicy | None,
    primitive: Primitive,
    operands: Sequence[jax.Array],
    params: Mapping[str, object],
) -> Saving | None:
    """How a policy saves the results of a primitive; None if they are computed again."""
    case = policy is not None and policy(primitive, *map(jax.typeof, operands), **params)
    if isinstance(case, Offloadable):
        there, here = _space_of(str(case.dst)), _space_of(str(case.src))
        return Saving(lambda x: jax.device_put(x, there), lambda x: jax.device_put(x, here))
    if case is True or isinstance(case, SaveableType):
        return Saving(lambda x: x, lambda x: x)
    return None


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes of a surrounding shard_map along which an array or aval differs."""
    return cast("frozenset[str]", _manual_axis_type(jax.typeof(x)).varying)


def vary_alike(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The arrays, each made to vary along all axes of a surrounding shard_map along which one of
    them does.

    The transpose of that is a sum over the devices, which is the gradient of a shared operand.
    """
    varying = list(map(varying_axes, arrays))
    if not (axes := frozenset[str]().union(*varying)):
        return tuple(arrays)
    missing = [tuple(sorted(axes - own)) for own in varying]
    return tuple(
        cast("jax.Array", jax.lax.pcast(x, over, to="varying")) if over else x
        for x, over in zip(arrays, missing, strict=True)
    )


def _manual_axis_type(aval: ShapedArray) -> ManualAxisType:
    with _needed("the attribute `mat` of jax.core.ShapedArray"):
        return aval.mat


def sharded_like(
    x: jax.ShapeDtypeStruct, sharding: NamedSharding, aval: ShapedArray
) -> ShapedArray:
    """The type of an array of this shape and sharding that varies over shard_map's axes as aval."""
    manual = _manual_axis_type(aval)
    return ShapedArray(x.shape, x.dtype, sharding=sharding, manual_axis_type=manual)


def platforms_of(context: Context) -> tuple[str, ...]:
    """The platforms that a lowering rule's context lowers for."""
    return tuple(context.platforms or context.module_context.platforms)


def lower_as(function: Callable[..., object], context: Context, operands: MlirValues) -> MlirValues:
    """Lower a primitive as this JAX function of its operands.

    Types lose their shardings here (Explicit mesh axes, shard_map's varying axes); from here on the
    partitioner decides.
    """
    plain = [ShapedArray(x.shape, x.dtype) for x in types_of(context)]
    lowered = cast("Callable[..., MlirValues]", mlir.lower_fun(function))
    return lowered(context.replace(avals_in=plain), *operands)


def lower_typed_as(
    function: Callable[..., object], context: Context, operands: MlirValues
) -> MlirValues:
    """Lower a primitive as this JAX function of its operands, without changing their types."""
    lowered = cast("Callable[..., MlirValues]", mlir.lower_fun(function))
    return lowered(context, *operands)


def types_of(context: Context) -> tuple[ShapedArray, ...]:
    """The types of the operands of the primitive that is lowered."""
    return tuple([x for x in context.avals_in if isinstance(x, ShapedArray)])


def is_export(context: Context) -> bool:
    """Whether a lowering rule's context lowers for `jax.export`."""
    return bool(context.module_context.lowering_parameters.for_export)


def number_of_devices(context: Context) -> int:
    """The number of devices that a lowering rule's context lowers for."""
    return int(getattr(context.module_context.axis_context, "num_devices", 1))


def with_devices(context: Context, mesh: Mesh | AbstractMesh, count: int) -> Context | None:
    """A lowering rule's context that names devices, which custom_partitioning requires.

    A primitive whose context names devices cannot be lowered under an AbstractMesh, so JAX is not
    asked for them. The partitioner only counts positions of devices in the program, so any devices
    will do, and the program is the same for all devices that it may be compiled for.

    Args:
      context: the context of a program for several devices.
      mesh: the mesh of the operands' types. One of another size, such as an empty one, is replaced
        by the mesh of the program's arguments and results, or by one with a single axis.
      count: the number of devices that split a call; in a shard_map over some axes those of one
        group, along the other axes.

    Returns:
      None if this process has fewer devices than the program is for.
    """
    module = context.module_context
    devices = tuple(cast("JaxClient", module.backend).devices())[:count]
    if len(devices) < count:
        return None
    if mesh.empty or mesh.size != count:
        mesh = mesh_of_program(context) or AbstractMesh((count,), ("all devices",))
    axes = ShardingContext(count, devices, cast("AbstractMesh", mesh))
    return context.replace(module_context=module.replace(axis_context=axes))


def mesh_of_program(context: Context) -> AbstractMesh | None:
    """The mesh of all devices along which the program's arguments or results are sharded.

    The types of arrays inside the program do not contain `in_shardings` and `out_shardings`.
    """
    module, count = context.module_context, number_of_devices(context)
    attributes = next(iter(module.module.body.operations)).attributes
    names = (name for name in ("arg_attrs", "res_attrs") if name in attributes)
    text = " ".join(str(attributes[name]) for name in names)
    for found in re.findall(r"#sdy\.sharding<mesh<\[(.*?)\]", text):
        sizes = {name: int(size) for name, size in re.findall(r'"([^"]+)"=(\d+)', found)}
        if math.prod(sizes.values()) == count:
            return AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return None


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """The program without equations whose results nothing uses, as JAX lowers it."""
    return _dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def frames_of(equation: JaxprEqn) -> list[tuple[str, int, str]]:
    """The file, line and function of each frame in which an equation was traced, innermost first.

    Empty if JAX did not keep them.
    """
    traceback = getattr(equation.source_info, "traceback", None)
    frames = cast("Sequence[Any]", getattr(traceback, "frames", ()))
    return [(x.file_name, x.line_num, x.function_name) for x in frames]


def is_recomputed(equation: JaxprEqn) -> bool:
    """Whether JAX computes an equation of the forward pass again, under `jax.checkpoint`.

    Equations within it are not marked themselves.
    """
    return "rematted_computation" in str(getattr(equation.source_info, "name_stack", ""))


@contextmanager
def tracing_for_nvidia(capability: tuple[int, int]) -> Generator[None]:
    """A block in which JAX traces its call of cuDNN's attention where there is no cuDNN.

    `jax.nn.dot_product_attention(implementation="cudnn")` asks for cuDNN's version and the GPU when
    it is traced, and raises where there is none. Other threads see the same answers meanwhile.

    Args:
      capability: the compute capability of the GPU that is traced for.
    """

    def version() -> int:
        return _ASSUMED_CUDNN

    def is_at_least(least: str) -> bool:
        return capability >= tuple(map(int, least.split(".")))

    answers = {"check_cudnn_version": version, "check_compute_capability": is_at_least}
    module = _cudnn_of_jax
    before = {name: getattr(module, name) for name in answers if hasattr(module, name)}
    try:
        for name in before:
            setattr(module, name, answers[name])
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


_ASSUMED_CUDNN = 91_900
"""9.19.0, in cuDNN's numbering."""


def result_types(context: Context) -> list[Any]:
    """MLIR's types of the results of the primitive that is lowered."""
    return [
        ir.RankedTensorType.get(x.shape, mlir.dtype_to_ir_type(x.dtype))
        for x in context.avals_out
        if isinstance(x, ShapedArray)
    ]


def sharding_rule(
    text: str, arguments: Mapping[str, object], operands: Sequence[Any], results: Sequence[Any]
) -> Any:
    """MLIR's form of a sharding rule, for operands and results of these types."""
    with _needed("custom_partitioning_sharding_rule in jax._src"):  # to explain programs on a mesh
        from jax._src import custom_partitioning_sharding_rule as rules
    parse = cast("Callable[..., object]", rules.str_to_sdy_sharding_rule)
    to_mlir = cast("Callable[..., object]", rules.sdy_sharding_rule_to_mlir)
    return to_mlir(parse(text, **arguments), list(operands), list(results))


def module_of(traced: Traced, platform: str) -> bytes:
    """The module of a traced function for one platform, which `call_module` reads."""
    module: Any = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    code = io.BytesIO()
    module.operation.write_bytecode(code)
    return code.getvalue()


def call_module(code: bytes, name: str, context: Context, operands: MlirValues) -> MlirValues:
    """Lower a primitive as a call of a module's function, which the program gets by this name."""
    program = context.module_context
    module = ir.Module.parse(code, context=program.context)
    name = merge_modules(program.module, name, module, dst_symtab=program.symbol_table)
    callee = ir.FlatSymbolRefAttr.get(name)
    call = func.CallOp(result_types(context), callee, list(operands))
    return cast("MlirValues", call.results)


def constants(arrays: Sequence[np.ndarray]) -> MlirValues:
    """Lower a primitive as these constants."""
    return cast("MlirValues", [mlir.ir_constant(x) for x in arrays])


# What differs between the supported versions of JAX. Under the heading of a version is what can be
# replaced when that version is the oldest one.

# JAX 0.11: `given.policy` replaces _policy_of.


def _policy_of(given: Any) -> RematPolicy | None:
    """The policy of a rule for `jax_remat3`. JAX 0.10 gives it, and 0.11 the trace that has it."""
    has_policy = isinstance(given, remat.RematTrace)
    return cast("RematPolicy | None", given.policy if has_policy else given)


# JAX 0.12: its three arguments replace _split_as_jax.


def _split_as_jax(
    results: Sequence[jax.Array], saved: object, again: Callable[..., Sequence[jax.Array]]
) -> tuple[object, ...]:
    """What a rule for `jax_remat3` returns. Before JAX 0.12, the function has what is saved."""
    if jax.__version_info__ >= (0, 12):
        return results, saved, again
    return results, partial(again, saved)


# A version without one of these flags: the default here replaces its function.


def uses_remat3() -> bool:
    """Whether `jax.checkpoint` has its new form."""
    return bool(getattr(jax.config, "jax_remat3", False))


def uses_shardy() -> bool:
    """Whether XLA propagates shardings by Shardy; newer JAX has nothing else."""
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", True))
