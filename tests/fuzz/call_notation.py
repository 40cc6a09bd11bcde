"""Drawn calls in lines of text and in files, as explain, plan and tune read them."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np

from attn_dispatch.cudnn import plan_store
from attn_dispatch.inspection import explain
from attn_dispatch.text import error_text
from attn_dispatch_tools.written_calls import notation
from attn_dispatch_tools.written_calls.json_file import calls_in, each_of
from tests.fuzz import mutations, strange_files

LINES = (
    "q=bf16[2,64,8,32] k=bf16[2,64,2,32] is_causal=true",
    "q=bf16[1,128,4,64] query_segment_ids=i32[1,128] max_segments=8",
    "q=f32[2,8,4,16], k=f32[2,24,4,16]; local_window_size=[7,0] causal_alignment=bottom_right",
    "q=f16[8,512,12,64] bias=f16[12,512,512] scale=0.1 logits_soft_cap=30.0",
    "q=bf16[2,1,8,64] k=bf16[2,4096,2,64] v=k key_value_seq_lengths=i32[2]",
    "q=bf16[2,16,4,8] mask=pred[1,1,16,16] implementation=xla return_lse=True",
    "q=bf16[2,16,4,8] alibi_slopes=f32[4] sinks=f32[4] implementation=[\"cudnn\",\"xla\"]",
    "q=bf16[16384,4,64] cu_seqlens_q=i32[17] cu_seqlens_kv=cu_seqlens_q max_seqlen_q=4096 "
    "max_seqlen_kv=4096 is_causal=true",
)  # fmt: skip
WRITTEN: list[dict[str, Any]] = [
    {
        "query": "bfloat16[8,2048,32,128]", "key": "bfloat16[8,2048,8,128]", "value": "key",
        "is_causal": True, "local_window_size": [1023, 0],
    },
    {
        "query": "bfloat16[16384,32,128]", "key": "bfloat16[16384,8,128]", "value": "key",
        "cu_seqlens_q": "int32[17]", "cu_seqlens_kv": "cu_seqlens_q",
        "max_seqlen_q": 4096, "max_seqlen_kv": 4096, "is_causal": True,
    },
    {"query": "float32[2,48,4,16]", "key": "query", "value": "query", "scale": 0.5},
]  # fmt: skip
NUMBERS = (
    "0", "1", "-1", "007", str(2**28), str(2**31), str(2**40 - 87), str(2**62), str(2**63),
    "9" * 30, "9" * 5000, "1.5", "1e400", "NaN", "Infinity", "null", "true", "[]", "[1,2,3]",
    "[[[]]]", "{}", '""', '"x"', "x", "q", "k", "bf16", "bf16[]", "object[2]", "V9999999999[1]",
    "(1,2)", " " * 50_000, "[" * 100_000, '"' + "x" * 20_000 + '"', "\0", "\x1b[2J", "µ[1,2]",
)  # fmt: skip
_MAX_CHARACTERS = 2001
"""The limit for an error, which shows what was wrong but not all of a long input."""


def draw(seed: int) -> str:
    """Read one call or file. Returns the kind of its error, or that it was explained."""
    random = Random(seed)
    plan_store.plan = lambda *_: ("an engine", 0)  # the time of cuDNN's planning is not tested
    target = random.choice(("h100", "mi300x", "cpu", "cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _file(random, target) if random.random() < 0.4 else _line(random, target)
        except (OSError, OverflowError, TypeError, ValueError) as error:
            assert 0 < len(error_text(error)) <= _MAX_CHARACTERS
            return f"{type(error).__name__}"


def _line(random: Random, target: str) -> str:
    line, changes = random.choice(LINES), random.choice((0, 1, 1, 1, 2, 5))
    changed = line
    for _ in range(changes):
        changed = _changed(random, changed)
    arguments: dict[str, Any] = {**notation.arguments(changed)}
    assert isinstance(arguments["query"], jax.ShapeDtypeStruct) or changes
    if "cu_seqlens_q" in arguments:
        return "packed"
    text = str(explain(**arguments, target=target))
    extents = np.shape(arguments["query"])  # lists of numbers are arrays too
    shape = ", ".join(map(str, extents))
    assert len(extents) != 4 or f"[{shape}]" in " ".join(text.split())
    return "explained" if changed != line else "explained as it is"


def _changed(random: Random, line: str) -> str:
    words = line.split(" ")
    at = random.randrange(len(words))
    name, _, value = words[at].partition("=")
    kind = random.randrange(7)
    if kind == 0:
        del words[at]
    elif kind == 1:
        words.insert(at, random.choice(random.choice(LINES).split(" ")))
    elif kind == 2:
        words[at] = f"{name}={random.choice(NUMBERS)}"
    elif kind in (3, 4) and "[" in value:  # one extent
        dtype, _, extents = value.rstrip("],;").partition("[")
        sizes = extents.split(",")
        sizes[random.randrange(len(sizes))] = random.choice(NUMBERS[:11])
        words[at] = f"{name}={dtype}[{','.join(sizes)}]"
    elif kind == 5:
        words[at] = f"{random.choice(('key', 'x', 'scale', 'implementation', ''))}={value}"
    else:
        return mutations.damaged(random, line.encode()).decode(errors="replace")
    return " ".join(words)


def _file(random: Random, target: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "calls.json")
        content = mutations.json_text(random, WRITTEN)
        if random.random() < 0.1:
            strange_files.make(random, file, content)
        else:
            file.write_bytes(content)
        calls_in(file)
        each_of(file, lambda **x: str(explain(**x, target=target)) if "query" in x else "")
    return "calls"
