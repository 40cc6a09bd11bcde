"""The calls of choices.py, the most informative first, because a time limit may stop a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attn_dispatch_tools.bench.masks import Mask

_TOKENS = 16384
_CAUSAL: dict[str, Any] = {"is_causal": True}
_BOTTOM_RIGHT: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}


@dataclass(frozen=True)
class Cell:
    """A public call."""

    name: str
    call: dict[str, Any]
    """The arguments as `attn-dispatch plan` reads them: an array is its dtype and shape."""
    lengths: tuple[int, ...] = ()
    """The lengths of its sequences: the values of ids, cu_seqlens or lengths of keys."""
    is_training: bool = True
    """Whether the backward pass is measured too."""


def _call(
    b: int,
    t: int,
    n: int,
    k: int,
    h: int,
    s: int | None = None,
    v: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The arguments of a call with these sizes."""
    s, v = t if s is None else s, h if v is None else v
    arrays = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, v)}
    return {name: _array("bfloat16", *shape) for name, shape in arrays.items()} | options


def _array(dtype: str, *shape: int) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _size(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _mask_name(options: dict[str, Any]) -> str:
    return "causal" if options else "full"


def _sinks() -> Iterator[Cell]:
    """The layers of GPT-OSS, with and without a window."""
    for b, t in ((1, 8192), (4, 2048)):
        windows: dict[str, dict[str, Any]] = {
            "": {},
            " window 128": {"local_window_size": (127, 0)},
        }
        for name, window in windows.items():
            sinks: dict[str, Any] = {"sinks": _array("float32", 64)}
            call = _call(b, t, 64, 8, 64, **_CAUSAL, **sinks, **window)
            yield Cell(f"sinks{name} d64 64/8 b{b} {_size(t)}", call)


def _wide() -> Iterator[Cell]:
    """Head dims beyond 256."""
    for t in (8192, 2048):
        for h in (512, 320):
            for options in (_CAUSAL, {}):
                call = _call(1, t, 8, 4, h, **options)
                yield Cell(f"d{h} {_mask_name(options)} 8/4 b1 {_size(t)}", call)
    sizes = (
        (1, 4096, 16, 8, 512),
        (1, 4096, 16, 16, 320),
        (8, 512, 8, 1, 384),
        (1, 1024, 8, 4, 512),
    )
    for b, t, n, k, h in (*sizes, (1, 512, 8, 4, 512)):
        for options in (_CAUSAL, {}):
            name = f"d{h} {_mask_name(options)} {n}/{k} b{b} {_size(t)}"
            yield Cell(name, _call(b, t, n, k, h, **options))


def _small() -> Iterator[Cell]:
    """Short sequences, images among them."""
    sizes = (
        (16, 197, 12, 64, ({},)),
        (1, 128, 8, 64, (_CAUSAL, {})),
        (8, 512, 8, 64, (_CAUSAL, {})),
        (1, 1024, 16, 128, (_CAUSAL, {})),
        (64, 197, 12, 64, ({},)),
        (2, 577, 16, 64, ({},)),
        (8, 128, 8, 64, ({},)),
        (1, 512, 8, 64, (_CAUSAL,)),
    )
    for b, t, n, h, all_options in sizes:
        for options in all_options:
            name = f"small d{h} {_mask_name(options)} {n}/{n} b{b} {t}"
            yield Cell(name, _call(b, t, n, n, h, **options))


def _documents() -> Iterator[Cell]:
    """Packed documents, given by segment ids and by cu_seqlens."""
    sizes = (
        (8192, 8, False), (16384, 16, True), (8192, 8, True), (8192, 2, False), (16384, 4, True),
        (32768, 8, True), (8192, 32, True), (32768, 32, True), (16384, 16, False), (32768, 2, True),
    )  # fmt: skip
    for tokens, count, is_uneven in sizes:
        lengths = tuple(Mask(documents=count, is_uneven=is_uneven).document_lengths(tokens))
        name = f"{count} {'uneven ' if is_uneven else ''}documents {_size(tokens)}"
        yield Cell(f"ids, {name}", _with_ids(1, tokens, count), lengths)
        call = _call(1, tokens, 32, 8, 128, **_CAUSAL)
        for array in ("query", "key", "value"):
            call[array] = call[array].replace("[1,", "[")
        call |= {"cu_seqlens_q": _array("int32", count + 1), "cu_seqlens_kv": "cu_seqlens_q"}
        call |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(lengths))
        yield Cell(f"cu_seqlens, {name}", call, lengths)
    lengths = tuple(Mask(documents=4, is_uneven=True).document_lengths(2048))
    yield Cell("ids, 4 uneven documents b4 2k", _with_ids(4, 2048, 4), lengths)
    lengths = tuple(Mask(documents=16, is_uneven=True).document_lengths(16384))
    call = _with_ids(1, 16384, 16) | {"max_segment_len": max(lengths)}
    yield Cell("ids with max_segment_len, 16 uneven documents 16k", call, lengths)


def _with_ids(b: int, tokens: int, count: int) -> dict[str, Any]:
    ids: dict[str, Any] = {"query_segment_ids": _array("int32", b, tokens), "max_segments": count}
    return _call(b, tokens, 32, 8, 128, **_CAUSAL, **ids)


def _latent() -> Iterator[Cell]:
    """Multi-head latent attention, whose keys are wider than its values."""
    for t in (8192, 2048, 16384, 512):
        for options in (_CAUSAL, {})[: 2 if t == 8192 else 1]:
            call = _call(_TOKENS // t, t, 16, 16, 192, v=128, **options)
            yield Cell(f"192/128 {_mask_name(options)} 16/16 {_size(t)}", call)


def _absorbed() -> Iterator[Cell]:
    """Decoding with latent attention, absorbed: all heads on one of 576, whose values are 512."""
    for n in (128, 16):
        for b, s in ((8, 8192), (1, 32768), (32, 2048)):
            call = _call(b, 1, n, 1, 576, s, v=512)
            name = f"decoding 1 of {_size(s)} 576/512 {n}/1 b{b}"
            yield Cell(name, call, is_training=False)
            call = call | {"key_value_seq_lengths": _array("int32", b)}
            yield Cell(f"{name}, cache 3/4 full", call, (3 * s // 4,) * b, is_training=False)


def _scores() -> Iterator[Cell]:
    """Soft caps and ALiBi."""
    for b, t in ((2, 8192), (8, 2048)):
        options: dict[str, dict[str, Any]] = {
            "soft cap": {"logits_soft_cap": 30.0},
            "ALiBi": {"alibi_slopes": _array("float32", 16)},
        }
        for name, option in options.items():
            call = _call(b, t, 16, 4, 128, **_CAUSAL, **option)
            yield Cell(f"{name} d128 16/4 b{b} {_size(t)}", call)


def _windows() -> Iterator[Cell]:
    for t in (8192, 32768):
        for window in (1024, 4096):
            call = _call(1, t, 32, 8, 128, **_CAUSAL, local_window_size=(window - 1, 0))
            yield Cell(f"window {window} d128 32/8 b1 {_size(t)}", call)
    for t, h in ((8192, 64), (8192, 256)):
        call = _call(1, t, 16, 16, h, **_CAUSAL, local_window_size=(1023, 0))
        yield Cell(f"window 1024 d{h} 16/16 b1 {_size(t)}", call)


def _lengths() -> Iterator[Cell]:
    """Padded batches, and queries that are not as many as keys."""
    for t, lengths in ((4096, (4096, 1000, 2500, 3300)), (1024, (1000, 300, 700, 512))):
        for options in (_CAUSAL, {}):
            keys: dict[str, Any] = {"key_value_seq_lengths": _array("int32", 4)}
            call = _call(4, t, 32, 8, 128, **options, **keys)
            name = f"lengths of keys {_mask_name(options)} d128 32/8 b4 {_size(t)}"
            yield Cell(name, call, lengths)
    for t, s in ((512, 8192), (4096, 16384), (2048, 4096)):
        call = _call(1, t, 32, 8, 128, s, **_BOTTOM_RIGHT)
        yield Cell(f"bottom right d128 32/8 b1 {_size(t)} of {_size(s)}", call)


def _decoding() -> Iterator[Cell]:
    """A few queries on many keys."""
    for t in (1, 4, 16):
        for b in (1, 8, 32):
            options = _BOTTOM_RIGHT if t > 1 else {}
            call = _call(b, t, 32, 8, 128, 4096, **options)
            yield Cell(f"decoding {t} of 4k d128 32/8 b{b}", call, is_training=False)


def _dense() -> Iterator[Cell]:
    for place, (t, h) in enumerate(
        (t, h) for t in (8192, 2048, 512, 16384) for h in (128, 64, 256)
    ):
        for options in (_CAUSAL, {}):
            n, k = ((32, 8), (16, 16))[place % 2]
            call = _call(_TOKENS // t, t, n, k, h, **options)
            yield Cell(f"d{h} {_mask_name(options)} {n}/{k} b{_TOKENS // t} {_size(t)}", call)


CELLS: tuple[Cell, ...] = (
    *_sinks(), *_wide(), *_small(), *_documents(), *_latent(), *_scores(), *_windows(), *_lengths(),
    *_dense(), *_decoding(), *_absorbed(),
)  # fmt: skip
