"""`attention_fn`: the function that Flax's layers call, by attn_dispatch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Unpack  # noqa: TID251  # the arguments of Flax's own attention

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.linen import dtypes
from jax.typing import ArrayLike, DTypeLike

from attn_dispatch.api import dot_product_attention
from attn_dispatch.call.keywords import LayerOptions
from attn_dispatch.call.static_arguments import window_sides
from attn_dispatch.inspection import axes_read_by
from attn_dispatch.integrations.layers import as_bool, is_same, text_of
from attn_dispatch.integrations.layers import check_options as check_layer_options
from attn_dispatch.mods.combining import WithQueryOffset
from attn_dispatch.programs.functions import MaskMod, ScoreMod
from attn_dispatch.warning import skip_frames_of, warn_of_convention

if TYPE_CHECKING:
    from flax.typing import PrecisionLike, PromoteDtypeFn

skip_frames_of(flax.__file__)

_DEFAULT = (None, "default", jax.lax.Precision.DEFAULT)


Attention = Callable[..., jax.Array]
_Einsum = Callable[..., jax.Array]


class Options(LayerOptions, total=False):
    """The options of attn_dispatch that `attention_fn` passes on."""

    scale: ArrayLike | None


def check_options(options: Mapping[str, object]) -> None:
    """Check the options of attn_dispatch that a layer is given.

    Raises:
      ValueError: an option is Flax's, asks for another order of axes or for further results.
    """
    check_layer_options(options, {"dropout_key": "dropout_rng, Flax's name for it,"})


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    module: nnx.Module | linen.Module | None = None,
    promote_dtype: PromoteDtypeFn | None = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: _Einsum | None = None,
    qk_attn_weights_einsum: _Einsum | None = None,
    attn_weights_value_einsum: _Einsum | None = None,
    **options: Unpack[Options],
) -> jax.Array:
    """`flax.nnx.dot_product_attention` and `flax.linen.dot_product_attention`, by attn_dispatch.

    Two arguments have no counterpart here and warn once: broadcast_dropout with dropout (each pair
    is dropped independently), and precision for float32 (`jax.default_matmul_precision` around the
    program is honoured). With `sow_weights=True` or another einsum, Flax's own attention computes
    the call, which also warns. The softmax is always in float32.

    In a decoding step Flax does not pass the position of the one query in its cache. A window or
    ALiBi therefore needs causal_alignment="bottom_right" there and, in each step,
    key_value_seq_lengths: the number of keys in the cache, including the new one. A mask passed to
    the layer needs neither.

    Args:
      query: [..., T, N, H].
      key: [..., S, K, H].
      value: [..., S, K, V]; the three are promoted as in Flax.
      bias: floating, broadcastable to [..., N, T, S].
      mask: the same, bool or numbers: attend where it is not 0.
      broadcast_dropout: not followed; see above.
      dropout_rng: the key for dropout.
      dropout_rate: the rate at which probabilities are dropped unless deterministic.
      deterministic: whether to drop nothing.
      dtype: the dtype of the computation, as in Flax.
      precision: not followed; see above.
      module: the module that keeps the weights.
      promote_dtype: as in Flax's NNX.
      is_causal: top-left. Linen has no such argument; give it by `attention`.
      force_fp32_for_softmax: whether the output is float32; the softmax always is.
      einsum_dot_general: as in Flax's Linen, whose own attention then computes the call.
      qk_attn_weights_einsum: the same.
      attn_weights_value_einsum: the same.
      options: further arguments of `attn_dispatch.dot_product_attention`.

    Returns:
      [..., T, N, V] in the promoted dtype; with force_fp32_for_softmax at least float32.

    Raises:
      ValueError: as `attn_dispatch.dot_product_attention`; options are given although Flax computes
        the call, or ask for further results; or a decoding step has a window or ALiBi, but not the
        query's position.
    """
    _warn_if_overridden(inspect.currentframe(), locals())
    check_options(options)
    einsums = (einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
    has_einsums = any(x is not None for x in einsums)
    if module is not None or has_einsums:
        cause = "another einsum" if has_einsums else "sow_weights"
        if options:
            raise ValueError(f"{cause}: expected no options of attn_dispatch, got {list(options)}")
        warn_of_convention(
            f"{cause}: Flax's own attention computes this call, because kernels return no weights"
            + (", nor take an einsum" if has_einsums else "")
        )
        theirs: dict[str, Any] = {
            "bias": bias, "mask": _with_causal(mask, query, key) if is_causal else mask,
            "broadcast_dropout": broadcast_dropout, "dropout_rng": dropout_rng,
            "dropout_rate": dropout_rate, "deterministic": deterministic, "dtype": dtype,
            "precision": precision, "module": module,
        }  # fmt: skip
        if isinstance(module, nnx.Module):
            theirs |= {} if promote_dtype is None else {"promote_dtype": promote_dtype}
            return nnx.dot_product_attention(query, key, value, **theirs)
        names = ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")
        theirs |= {x: y for x, y in zip(names, einsums, strict=True) if y is not None}
        if force_fp32_for_softmax:
            theirs["force_fp32_for_softmax"] = True
        return linen.dot_product_attention(query, key, value, **theirs)

    if promote_dtype is None:
        query, key, value = dtypes.promote_dtype(query, key, value, dtype=dtype)
    else:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    if query.shape[-3] == 1 and key.shape[-3] != 1:
        _check_one_query(options, query.dtype, has_mask=mask is not None)
    is_dropped = not deterministic and dropout_rate > 0
    if is_dropped and broadcast_dropout:
        warn_of_convention(
            "broadcast_dropout: each pair of query and key is dropped independently here, in every "
            "batch row and head, as with broadcast_dropout=False"
        )
    if _is_not_default(precision) and jnp.finfo(query.dtype).bits > 16:
        warn_of_convention(
            f"precision: no counterpart for {precision}; jax.default_matmul_precision around the "
            "program is honoured"
        )
    options["qkv_layout"] = "BTNH"
    out = dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        mask=None if mask is None else as_bool(mask),
        is_causal=is_causal,
        dropout_rate=dropout_rate if is_dropped else 0.0,
        dropout_key=dropout_rng if is_dropped else None,
        **options,
    )
    widens = force_fp32_for_softmax and out.dtype.itemsize < 4
    return out.astype(jnp.float32) if widens else out


def _warn_if_overridden(frame: FrameType | None, received: Mapping[str, object]) -> None:
    """Warn if a layer passes other arguments than the partial of `attention_fn` that it calls."""
    caller = None if frame is None else frame.f_back
    lost = _overridden(_partials_of(attention_fn, caller), received)
    if lost:
        names = ", ".join(f"{name}={text_of(value)}" for name, value in lost.items())
        passed = ", ".join(f"{name}={text_of(received[name])}" for name in lost)
        warn_of_convention(
            f"partial(attention_fn, {names}): the layer passes {passed}, which overrides it. Use "
            f"attention({names}), which keeps it, or pass it to the layer"
        )


def _partials_of(function: Attention, frame: FrameType | None) -> list[functools.partial[Any]]:
    """The partials of a function among the variables of its caller, and the fields of its `self`.

    A function does not see whether it was called through a partial; a layer's frame shows it.
    """
    if frame is None:
        return []
    held = dict(frame.f_locals)
    held |= getattr(held.get("self"), "__dict__", {})
    return [x for x in held.values() if isinstance(x, functools.partial) and x.func is function]


def _overridden(
    partials: list[functools.partial[Any]], received: Mapping[str, object]
) -> dict[str, object]:
    """The arguments of a partial that its caller has overridden: names with the partial's values.

    Args:
      partials: those that may have been called.
      received: the arguments that their function received.
    """
    differing = [
        {
            name: value
            for name, value in partial.keywords.items()
            if name in received and not is_same(value, received[name])
        }
        for partial in partials
    ]
    return differing[0] if len(differing) == 1 else {}


def _check_one_query(options: Options, dtype: np.dtype, *, has_mask: bool) -> None:
    """Check that options do not depend on the unknown position of one query among many keys.

    Flax passes its cache at full length, with a mask of the keys that are in it.
    """
    sides = window_sides(options.get("local_window_size"))
    has_window = any(side is not None for side in sides)
    has_alibi = options.get("alibi_slopes") is not None
    by_place = ["local_window_size"] * has_window + ["alibi_slopes"] * has_alibi
    if by_place and not _is_placed(options, has_mask):
        or_a_mask = "; or call the layer with the window as a mask" if has_window else ""
        raise ValueError(
            f'{" and ".join(by_place)}: expected causal_alignment="bottom_right" and '
            "key_value_seq_lengths for one query and several keys, because Flax does not pass the "
            "query's position in its cache. The lengths are the number of keys in the cache in "
            f"this step, including the new one{or_a_mask}. Without a cache, "
            'causal_alignment="top_left" means that the query is the first'
        )
    mods = (
        ("score_mod", options.get("score_mod"), options.get("score_mod_args", ())),
        ("mask_mod", options.get("mask_mod"), options.get("mask_mod_args", ())),
    )
    for name, mod, read in mods:
        if mod is not None and _reads_place(name, mod, read, dtype):
            warn_of_convention(
                f"{name}: the one query of a decoding step has t = 0, because Flax does not pass "
                "its position in the cache; attn_dispatch.mods.with_query_offset sets it"
            )


def _is_placed(options: Options, has_mask: bool) -> bool:
    alignment = options.get("causal_alignment")
    if alignment is not None and not isinstance(alignment, str):
        return True  # the query's own place
    ends = ("key_value_seq_lengths", "query_segment_ids", "key_value_segment_ids")
    has_end = not has_mask or any(options.get(name) is not None for name in ends)
    return alignment == "top_left" or (alignment == "bottom_right" and has_end)


def _reads_place(
    name: str, mod: ScoreMod | MaskMod, read: Sequence[object], dtype: np.dtype
) -> bool:
    """Whether a mod's result depends on t, and no `with_query_offset` sets t."""
    if isinstance(mod, WithQueryOffset):
        return False
    return "t" in axes_read_by(name, mod, read, dtype)


def _with_causal(mask: ArrayLike | None, query: jax.Array, key: jax.Array) -> jax.Array:
    """The mask, with the keys after each query masked too."""
    pairs = jnp.tril(jnp.ones((jnp.shape(query)[-3], jnp.shape(key)[-3]), bool))
    return pairs if mask is None else as_bool(mask) & pairs


def _is_not_default(precision: PrecisionLike) -> bool:
    each = precision if isinstance(precision, tuple) else (precision,)
    return any(x not in _DEFAULT for x in each)
