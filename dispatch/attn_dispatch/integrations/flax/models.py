"""attn_dispatch in place of Flax's attention function, in models of NNX or Linen as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Unpack, cast

from flax import linen, nnx

from attn_dispatch.integrations.flax.function import attention_fn
from attn_dispatch.integrations.flax.with_options import FlaxOptions, attention
from attn_dispatch.integrations.merging import Attention
from attn_dispatch.warning import warn_of_convention

Model = TypeVar("Model", nnx.Module, linen.Module)

_THEIRS = (nnx.dot_product_attention, linen.dot_product_attention, attention_fn)


def replace_attention(model: Model, **options: Unpack[FlaxOptions]) -> Model:
    """The model with attn_dispatch in place of Flax's attention function.

        model = replace_attention(model, local_window_size=(4095, 0))

    Layers are those that call the function in one of their fields, as Flax's MultiHeadAttention and
    MultiHeadDotProductAttention do in attention_fn. Parameters, and fields with other functions,
    stay as they are. Attention that a model computes with einsum is not replaced.

    Args:
      model: of NNX, which is changed itself, or of Linen, of which a copy of the same parameters is
        returned. Linen makes its layers when it is applied, so they are replaced then; if a call
        has none, a warning reports it.
      options: of every layer, as for `attention`.

    Raises:
      ValueError: an NNX model has no such layer; or as `attention`.
      TypeError: there is no such option, or the model is of neither kind.
    """
    ours = attention(**options)
    if isinstance(model, nnx.Module):
        _replace_in_nnx(model, ours)
        return model
    if isinstance(model, linen.Module):
        return _linen_with(model, ours)
    raise TypeError(f"model: expected a module of NNX or Linen, got {type(model).__name__}")


def _replace_in_nnx(model: nnx.Module, ours: Attention) -> None:
    others: list[str] = []
    number = 0
    for _, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Module):
            continue
        for name, value in list(vars(node).items()):
            if any(value is x for x in _THEIRS):
                setattr(node, name, ours)
                number += 1
            elif name == "attention_fn":
                others.append(f"{type(node).__name__}.attention_fn={value!r}")
    if not number:
        seen = f"; found {', '.join(dict.fromkeys(others))}" if others else ""
        raise ValueError(
            "replace_attention: expected layers with Flax's attention function in a field, got "
            f"{type(model).__name__} without{seen}. Attention by einsum has no such field"
        )


def _linen_with(model: linen.Module, ours: Attention) -> linen.Module:
    """A copy of the model, of a subclass of its class, that replaces the function in its layers."""
    theirs = type(model)

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
        calls += len(names)
        return call(*args, **kwargs)

    calls = 0

    class Replaced(theirs):
        @linen.nowrap
        def _call_wrapped_method(self, fun: Any, args: Any, kwargs: Any) -> Any:
            before = calls
            with linen.intercept_methods(replacing):
                method = cast("Callable[..., Any]", super()._call_wrapped_method)
                out = method(fun, args, kwargs)
            if fun.__name__ == "__call__" and calls == before:
                warn_of_convention(
                    f"replace_attention: {theirs.__name__} calls no attention function of Flax "
                    "that is in a field of a layer; attention by einsum has no such field"
                )
            return out

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Replaced, name, getattr(theirs, name))
    fields = [x.name for x in dataclasses.fields(model) if x.init and x.name != "parent"]
    return Replaced(**{name: getattr(model, name) for name in fields})
