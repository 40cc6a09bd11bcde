"""attn_dispatch in place of Flax's attention function, in models of NNX or Linen as they are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, Unpack, cast  # noqa: TID251  # the methods of Linen's modules

from flax import linen, nnx

from attn_dispatch.integrations.flax.function import Attention, attention_fn
from attn_dispatch.integrations.flax.with_options import FlaxOptions, attention
from attn_dispatch.integrations.layers import has_name_of_attention, warn_of_staying
from attn_dispatch.warning import warn_of_convention

Model = TypeVar("Model", nnx.Module, linen.Module)

_THEIRS = (nnx.dot_product_attention, linen.dot_product_attention, attention_fn)

_FIELD = "attention_fn"
"""The field in which Flax's layers have their attention function."""

_REMEDY = (
    "Make a layer with attention_fn=attention(…), of attn_dispatch.integrations.flax, or call "
    "attn_dispatch.dot_product_attention where a layer computes scores itself"
)


def replace_attention(model: Model, **options: Unpack[FlaxOptions]) -> Model:
    """The model with attn_dispatch in place of Flax's attention function.

        model = replace_attention(model, local_window_size=(4095, 0))

    Layers are those that call the function in one of their fields, as Flax's MultiHeadAttention and
    MultiHeadDotProductAttention do in attention_fn. Parameters, and fields with other functions,
    stay as they are. Attention that a model computes with einsum is not replaced. A warning names
    layers that stay beside replaced ones: those with another attention_fn, and those whose class is
    named like attention, such as SelfAttention.

    Args:
      model: of NNX, which is changed itself, or of Linen, of which a copy of the same parameters is
        returned. Linen makes its layers when it is applied, so they are replaced then; if a call
        has none, a warning reports it.
      options: of every layer, as for `attention`.

    Raises:
      ValueError: an NNX model has no such layer, or the model was replaced already; or as
        `attention`.
      TypeError: there is no such option, or the model is of neither kind.
    """
    ours = attention(**options)
    if isinstance(model, nnx.Module):
        _replace_in_nnx(model, ours, options)
        return model
    if isinstance(model, linen.Module):
        return _linen_with(model, ours, options)
    raise TypeError(f"model: expected a module of NNX or Linen, got {type(model).__name__}")


def _replace_in_nnx(model: nnx.Module, ours: Attention, options: Mapping[str, object]) -> None:
    replaced, named, has_ours = 0, list[str](), False
    known: set[int] = set()  # layers that are replaced, have our function, or are named
    nodes = [(path, x) for path, x in nnx.iter_graph(model) if isinstance(x, nnx.Module)]
    for path, node in nodes:  # a layer comes after those in it
        names = [name for name, x in vars(node).items() if any(x is y for y in _THEIRS)]
        for name in names:
            setattr(node, name, ours)
        replaced += len(names)
        is_ours = _is_ours(vars(node).get(_FIELD))
        has_ours |= is_ours and not names
        if not names and _may_stay(node, options):
            if is_ours or not any(id(x) in known for _, x in nnx.iter_graph(node)):
                named.append(_described(path, node))
                known.add(id(node))
        elif names or is_ours:
            known.add(id(node))
    if replaced:
        warn_of_staying(named, options, _REMEDY)
    elif has_ours:
        raise _replaced_already(model)
    else:
        seen = f"; found {'; '.join(named)}" if named else ""
        raise ValueError(
            "replace_attention: expected layers with Flax's attention function in a field, got "
            f"{type(model).__name__} without{seen}. Attention by einsum has no such field"
        )


def _may_stay(layer: nnx.Module | linen.Module, options: Mapping[str, object]) -> bool:
    """Whether a layer in which nothing was replaced lacks our function, or the options."""
    function = vars(layer).get(_FIELD)
    if _is_ours(function):
        return bool(options)
    return callable(function) or has_name_of_attention(layer)


def _is_ours(function: object) -> bool:
    """Whether a function is `attention_fn` with options, by `attention` or a partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__wrapped__", function) is attention_fn


def _described(path: Iterable[object], layer: nnx.Module | linen.Module) -> str:
    """A layer's place and type, with its function."""
    function = vars(layer).get(_FIELD)
    text = "attn_dispatch's, with other options" if _is_ours(function) else repr(function)
    name = type(layer).__name__ + (f".attention_fn={text}" if callable(function) else "")
    place = "/".join(map(str, path))
    return f"{place}: {name}" if place else name


def _replaced_already(model: nnx.Module | linen.Module) -> ValueError:
    return ValueError(
        f"replace_attention: expected a model that was not replaced, got {type(model).__name__} "
        "with attn_dispatch's attention already. Make the model again to give it other options"
    )


def _intercepted(model: type[linen.Module]) -> type[linen.Module]:
    """The class of a model, or a subclass of it whose call goes through `_call_wrapped_method`.

    The `__call__` that `linen.remat(Model)` and the like make does not.
    """
    if model.__module__ != linen.transforms.__name__:
        return model

    class Intercepted(model):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    return Intercepted


def _linen_with(
    model: linen.Module, ours: Attention, options: Mapping[str, object]
) -> linen.Module:
    """A copy of the model, of a subclass of its class, that replaces the function in its layers."""
    theirs = type(model)
    if hasattr(theirs, "_has_attn_dispatch"):
        raise _replaced_already(model)

    def replacing(
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: linen.module.InterceptorContext,
    ) -> Any:
        nonlocal calls
        layer = context.module
        names = [name for name, x in vars(layer).items() if any(x is y for y in (*_THEIRS, ours))]
        for name in names:
            object.__setattr__(layer, name, ours)  # layers are frozen
        calls += len(names) or _is_ours(vars(layer).get(_FIELD))
        before = (calls, len(named))
        out = call(*args, **kwargs)
        is_whole = context.method_name == "__call__" and before == (calls, len(named))
        if is_whole and not names and _may_stay(layer, options):
            named.append(_described(layer.path, layer))
        return out

    calls = 0
    named: list[str] = []

    class Replaced(_intercepted(theirs)):
        _has_attn_dispatch = True

        @linen.nowrap
        def _call_wrapped_method(self, fun: Any, args: Any, kwargs: Any) -> Any:
            stayed = len(named)
            with linen.intercept_methods(replacing):
                method = cast("Callable[..., Any]", super()._call_wrapped_method)
                out = method(fun, args, kwargs)
            if fun.__name__ == "__call__" and not calls:  # linen.jit traces the first call alone
                seen = f"; found {'; '.join(named[stayed:])}" if named[stayed:] else ""
                warn_of_convention(
                    f"replace_attention: {theirs.__name__} calls no attention function of Flax "
                    f"that is in a field of a layer{seen}; attention by einsum has no such field"
                )
            else:
                warn_of_staying(named[stayed:], options, _REMEDY)
            return out

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Replaced, name, getattr(theirs, name))
    fields = [x.name for x in dataclasses.fields(model) if x.init and x.name != "parent"]
    return Replaced(**{name: getattr(model, name) for name in fields})
