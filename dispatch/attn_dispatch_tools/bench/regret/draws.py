"""Calls drawn at random, of every kind that users make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from attn_dispatch_tools.bench.regret.timed_call import TimedCall
from attn_dispatch_tools.terminal.name_patterns import matches
from attn_dispatch_tools.verify.seeded_random import SeededRandom

_HEADS = ((1, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (8, 8), (16, 2), (16, 4), (16, 8),
          (16, 16), (32, 4), (32, 8), (32, 16), (32, 32), (64, 8))  # fmt: skip
_MOST_WORK = 2**31 * 128
"""Pairs times heads times head dim of a drawn call: some 20 ms with gradients on an H200."""
_MOST_ELEMENTS = 2**27
"""Elements of query, of a bias and of a mask."""


class _Draw:
    """The sizes of one call. `sizes` is drawn anew until the call is not too large."""

    def __init__(self, dice: SeededRandom) -> None:
        self.dice = dice

    def sizes(
        self,
        tokens: tuple[int, ...] = (512, 1000, 1024, 2048, 3000, 4096, 8192, 16384),
        dims: tuple[int, ...] = (32, 64, 64, 80, 96, 128, 128, 128, 192, 256),
        most_pairs: int = 2**62,
    ) -> dict[str, Any]:
        """b, t, n, k, h and dtype."""
        dice = self.dice
        while True:
            t, h = dice.one_of(tokens), dice.one_of(dims)
            n, k = dice.one_of(_HEADS)
            b = dice.one_of((1, 1, 2, 4, 8, 16))
            pairs = b * n * t * t
            if pairs * h <= _MOST_WORK and b * t * n * h <= _MOST_ELEMENTS and pairs <= most_pairs:
                dtype = "float16" if dice.is_one_in(5) else "bfloat16"
                return {"b": b, "t": t, "n": n, "k": k, "h": h, "dtype": dtype}

    def lengths(self, total: int, count: int) -> tuple[int, ...]:
        """Lengths of so many documents with this sum, uneven half of the time."""
        parts = [1.0] * count
        if not self.dice.is_one_in(2):
            parts = [0.15 + self.dice.up_to(1000) / 500 for _ in range(count)]
        ends = [round(total * sum(parts[:i]) / sum(parts)) for i in range(count + 1)]
        return tuple(ends[i + 1] - ends[i] for i in range(count))

    def window(self, t: int) -> tuple[int, int]:
        return self.dice.one_of([x for x in (127, 255, 511, 1023, 2047, 4095) if x < t]), 0


def call_of(
    b: int, t: int, n: int, k: int, h: int, dtype: str,
    s: int | None = None, v: int | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of a call with these sizes."""
    s, v = t if s is None else s, h if v is None else v
    shapes = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, v)}
    return {name: array(dtype, *shape) for name, shape in shapes.items()} | options


def array(dtype: str, *shape: int) -> str:
    """An array as written calls have it."""
    return f"{dtype}[{','.join(map(str, shape))}]"


_CAUSAL: dict[str, Any] = {"is_causal": True}
_BOTTOM_RIGHT: dict[str, Any] = _CAUSAL | {"causal_alignment": "bottom_right"}


def _causal(draw: _Draw) -> TimedCall:
    return TimedCall("causal", call_of(**draw.sizes(), **_CAUSAL))


def _full(draw: _Draw) -> TimedCall:
    return TimedCall("full", call_of(**draw.sizes()))


def _window(draw: _Draw) -> TimedCall:
    sizes = draw.sizes()
    options: dict[str, Any] = _CAUSAL | {"local_window_size": list(draw.window(sizes["t"]))}
    return TimedCall("window", call_of(**sizes, **options))


def _small(draw: _Draw) -> TimedCall:
    sizes = draw.sizes((64, 128, 197, 256, 384, 512), (32, 64, 64, 128), 2**22)
    return TimedCall("small", call_of(**sizes, **({} if draw.dice.is_one_in(2) else _CAUSAL)))


def _latent(draw: _Draw) -> TimedCall:
    sizes = draw.sizes(dims=(192,))
    options: dict[str, Any] = {} if draw.dice.is_one_in(4) else _CAUSAL
    return TimedCall("192/128", call_of(**sizes, v=128, **options))


def _wide(draw: _Draw) -> TimedCall:
    sizes = draw.sizes((512, 1024, 2048, 4096), (320, 384, 512))
    return TimedCall("wide", call_of(**sizes, **({} if draw.dice.is_one_in(2) else _CAUSAL)))


def _sinks(draw: _Draw) -> TimedCall:
    sizes = draw.sizes(dims=(64, 64, 128))
    options: dict[str, Any] = _CAUSAL | {"sinks": array("float32", sizes["n"])}
    if draw.dice.is_one_in(2):
        options["local_window_size"] = list(draw.window(sizes["t"]))
    return TimedCall("sinks", call_of(**sizes, **options))


def _soft_cap(draw: _Draw) -> TimedCall:
    sizes = draw.sizes(dims=(64, 128, 128, 256))
    return TimedCall("soft cap", call_of(**sizes, **_CAUSAL, logits_soft_cap=30.0))


def _alibi(draw: _Draw) -> TimedCall:
    sizes = draw.sizes(dims=(64, 128))
    slopes = array("float32", sizes["n"])
    return TimedCall("ALiBi", call_of(**sizes, **_CAUSAL, alibi_slopes=slopes))


def _bias(draw: _Draw) -> TimedCall:
    while True:
        sizes = draw.sizes((512, 1000, 1024, 2048, 4096), (64, 128))
        b, n = draw.dice.one_of(((1, 1), (1, sizes["n"]), (sizes["b"], sizes["n"])))
        if b * n * sizes["t"] ** 2 <= _MOST_ELEMENTS:
            break
    bias = array(sizes["dtype"], b, n, sizes["t"], sizes["t"])
    return TimedCall("bias", call_of(**sizes, bias=bias))


def _score_mod(draw: _Draw) -> TimedCall:
    sizes = draw.sizes(dims=(64, 128))
    return TimedCall(
        "score_mod", call_of(**sizes, **_CAUSAL), mods={"score_mod": ["relative_bias", 0.05]}
    )


def _mod(draw: _Draw, name: str, kind: str, *numbers: int, sizes: dict[str, Any]) -> TimedCall:
    del draw
    return TimedCall(f"mask_mod: {kind}", call_of(**sizes), mods={"mask_mod": [name, *numbers]})


def _prefix(draw: _Draw) -> TimedCall:
    sizes = draw.sizes()
    length = draw.dice.between(sizes["t"] // 16, sizes["t"] // 2)
    return _mod(draw, "prefix", "prefix", length, sizes=sizes)


def _window_and_first(draw: _Draw) -> TimedCall:
    sizes = draw.sizes()
    window = draw.dice.between(64, sizes["t"] // 2)
    numbers = window, draw.dice.one_of((4, 16, 64, 128))
    return _mod(draw, "window_and_first", "window and first", *numbers, sizes=sizes)


def _documents_and_first(draw: _Draw) -> TimedCall:
    sizes = draw.sizes()
    length = draw.dice.one_of([x for x in (256, 500, 512, 1024, 2048) if x < sizes["t"]] or [256])
    return _mod(draw, "documents_and_first", "documents and first", length, 16, sizes=sizes)


def _chunks(draw: _Draw) -> TimedCall:
    sizes = draw.sizes()
    chunk = draw.dice.one_of([x for x in (256, 512, 1024, 4096) if x < sizes["t"]])
    return _mod(draw, "chunks", "chunks", chunk, sizes=sizes)


def _dilated(draw: _Draw) -> TimedCall:
    sizes = draw.sizes()
    left = draw.dice.between(sizes["t"] // 8, sizes["t"] // 2)
    return _mod(draw, "dilated", "dilated", left, draw.dice.one_of((2, 4)), sizes=sizes)


def _images(draw: _Draw) -> TimedCall:
    sizes = draw.sizes()
    return _mod(draw, "images", "images", draw.dice.one_of((144, 256, 576)), sizes=sizes)


def _mask_array(draw: _Draw) -> TimedCall:
    while True:
        sizes = draw.sizes((512, 1000, 1024, 2048, 3000, 4096))
        b = draw.dice.one_of((1, sizes["b"]))
        if b * sizes["t"] ** 2 <= _MOST_ELEMENTS:
            break
    window = draw.dice.between(64, sizes["t"])
    mods: dict[str, list[Any]] = {"mask": ["window_and_first", window, 16]}
    mask = array("bool", b, 1, sizes["t"], sizes["t"])
    return TimedCall("mask array", call_of(**sizes, mask=mask), mods=mods)


def _with_ids(draw: _Draw, kind: str) -> tuple[TimedCall, int]:
    sizes = draw.sizes((512, 1024, 2048, 3000, 4096, 8192, 16384), (64, 128, 128, 256))
    count = draw.dice.one_of([x for x in (2, 4, 8, 16, 32) if 32 * x <= sizes["t"]])
    ids: dict[str, Any] = {"query_segment_ids": array("int32", sizes["b"], sizes["t"])}
    call = call_of(**sizes, **_CAUSAL, **ids)
    return TimedCall(kind, call, draw.lengths(sizes["t"], count)), count


def _ids(draw: _Draw) -> TimedCall:
    found, count = _with_ids(draw, "ids")
    found.call["max_segments"] = count
    if draw.dice.is_one_in(2):
        found.call["max_segment_len"] = max(found.lengths)
    if draw.dice.is_one_in(3):
        found.call["local_window_size"] = [draw.dice.one_of((127, 1023)), 0]
    return found


def _ids_alone(draw: _Draw) -> TimedCall:
    return _with_ids(draw, "ids without max_segments")[0]


def _ragged(draw: _Draw) -> TimedCall:
    sizes = draw.sizes((2048, 4096, 8192, 16384), (64, 128, 128, 256)) | {"b": 1}
    count = draw.dice.one_of((2, 4, 8, 16, 32))
    lengths = draw.lengths(sizes["t"], count)
    call = call_of(**sizes, **_CAUSAL)
    for name in ("query", "key", "value"):
        call[name] = call[name].replace("[1,", "[")
    call |= {"cu_seqlens_q": array("int32", count + 1), "cu_seqlens_kv": "cu_seqlens_q"}
    call |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(lengths))
    return TimedCall("ragged", call, lengths)


def _lengths(draw: _Draw) -> TimedCall:
    sizes = draw.sizes((512, 1024, 2048, 4096, 8192), (64, 128, 128, 256))
    lengths = tuple(draw.dice.between(sizes["t"] // 4, sizes["t"]) for _ in range(sizes["b"]))
    options: dict[str, Any] = {"key_value_seq_lengths": array("int32", sizes["b"])}
    if draw.dice.is_one_in(2):
        options["query_seq_lengths"] = "key_value_seq_lengths"
    causal = {} if draw.dice.is_one_in(2) else _CAUSAL
    return TimedCall("lengths", call_of(**sizes, **causal, **options), lengths)


def _cross(draw: _Draw) -> TimedCall:
    sizes = draw.sizes((1024, 2048, 4096), (64, 64, 128))
    return TimedCall("cross", call_of(**sizes, s=draw.dice.one_of((77, 256, 512, 1500))))


def _prefill(draw: _Draw) -> TimedCall:
    sizes = draw.sizes((256, 512, 1024, 2048), (64, 128, 128, 256))
    s = sizes["t"] * draw.dice.one_of((2, 4, 8))
    options: dict[str, Any] = {**_BOTTOM_RIGHT}
    return TimedCall("prefill", call_of(**sizes, s=s, **options), is_training=False)


def _decode(draw: _Draw) -> TimedCall:
    sizes = draw.sizes((1, 1, 2, 4, 8), (64, 128, 128, 256))
    s, b = draw.dice.one_of((1024, 2048, 4096, 8192, 32768)), draw.dice.one_of((1, 4, 16, 64))
    while b * s * sizes["k"] * sizes["h"] > _MOST_ELEMENTS:
        b = max(b // 2, 1)
        s = s if b > 1 else s // 2
    sizes["b"], options, lengths = b, dict[str, Any](), ()
    if draw.dice.is_one_in(2):
        lengths = tuple(draw.dice.between(s // 4, s) for _ in range(b))
        options["key_value_seq_lengths"] = array("int32", b)
    if sizes["t"] > 1:
        options |= _BOTTOM_RIGHT
    return TimedCall("decode", call_of(**sizes, s=s, **options), lengths, is_training=False)


def _paged(draw: _Draw) -> TimedCall:
    found = _decode(draw)
    query = [int(x) for x in found.call["query"].split("[")[1][:-1].split(",")]
    key = [int(x) for x in found.call["key"].split("[")[1][:-1].split(",")]
    page = draw.dice.one_of((16, 64, 128))
    dtype, pages = found.call["query"].split("[")[0], key[1] // page
    pool = array(dtype, key[0] * pages, page, *key[2:])
    lengths = found.lengths or (key[1],) * key[0]
    call = {"query": array(dtype, *query), "key_pages": pool, "value_pages": pool}
    call["page_table"] = array("int32", key[0], pages)
    call["key_value_seq_lengths"] = array("int32", key[0])
    return TimedCall("paged", call, lengths, is_training=False)


KINDS: tuple[Callable[[_Draw], TimedCall], ...] = (
    _causal, _full, _window, _small, _small, _latent, _wide, _sinks, _soft_cap, _alibi, _bias,
    _score_mod, _prefix, _window_and_first, _documents_and_first, _chunks, _dilated, _images,
    _mask_array, _ids, _ids, _ids_alone, _ragged, _ragged, _lengths, _cross, _prefill, _decode,
    _paged, _causal,
)  # fmt: skip


def drawn(count: int, seed: int, kinds: Sequence[str] = ("*",)) -> list[TimedCall]:
    """So many calls: every kind in turn, of those named like a pattern.

    The same arguments give the same calls everywhere.

    Raises:
      ValueError: no kind is named like the patterns.
    """
    found: list[TimedCall] = []
    for i in itertools.count():
        call = KINDS[i % len(KINDS)](_Draw(SeededRandom(f"{seed}/{i}")))
        if any(matches(call.kind, x) for x in kinds):
            found.append(call)
        if len(found) == count:
            return found
        if i == len(KINDS) and not found:
            raise ValueError(f"no kind of drawn calls is named like {' or '.join(kinds)!r}")
    raise AssertionError
