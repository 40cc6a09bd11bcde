"""Serving a small model: continuous batching beside static batches.

On a GPU the model has SmolLM2-135M's shapes, random weights and bfloat16; elsewhere it is a tiny
one in float32. The same requests, whose lengths have a long tail (log-normal), are answered with
examples/serve and with static batches. A static batch is one program: prompts padded to the
longest, a dense cache that is written in place, and steps until the longest answer is done, with
our attention or that of jax.nn. Times do not include compilation.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Script

from attn_dispatch import dot_product_attention

sys.path.append(str(Path(__file__).parents[1]))

from examples.serve.engine import Engine
from examples.serve.request import Request
from examples.smollm2.model import (
    Config,
    by_layer,
    finish,
    logits_of,
    project,
    rotary_angles,
)
from examples.smollm2.model import forward as forward_pass
from examples.smollm2.random_weights import SMOLLM2_135M, drawn

NO_END = -1
"""The id of a token that never occurs, so that all answers have their full length."""


@dataclasses.dataclass(frozen=True)
class Size:
    config: Config
    dtype: str
    slots: int
    requests: int
    most: int
    """The longest answer."""
    prompt: int
    """The longest prompt."""
    page: int


GPU = Size(SMOLLM2_135M, "bfloat16", 64, 1000, 1024, 192, 64)
TINY = Size(
    dataclasses.replace(
        SMOLLM2_135M, layers=2, heads=4, kv_heads=2, head_dim=16, width=64, ffn_width=64,
        vocab=128, context=256,
    ),
    "float32", 8, 48, 64, 24, 16,
)  # fmt: skip


def requests_of(size: Size) -> list[Request]:
    rng = np.random.default_rng(0)
    answers = np.clip(rng.lognormal(np.log(size.most / 32), 1.3, size.requests), 1, size.most)
    return [
        Request(rng.integers(0, size.config.vocab, rng.integers(8, size.prompt + 1)).tolist(), n)
        for n in np.ceil(answers).astype(int).tolist()
    ]


def continuous(size: Size, params: Any) -> tuple[list[list[int]], float, dict[str, Any]]:
    """The answers of the engine, the seconds that they took, and facts about the run."""
    per_request = -(-(size.prompt + size.most) // size.page)
    engine = Engine(
        params, size.config, NO_END, slots=size.slots, page_size=size.page,
        num_pages=size.slots * per_request // 2, chunk=size.prompt,
    )  # fmt: skip
    engine.prepare(size.prompt + size.most)
    requests = requests_of(size)
    for request in requests:
        engine.add(request)
    compiled = engine.compile_seconds
    started = time.perf_counter()
    engine.run()
    seconds = time.perf_counter() - started
    assert engine.compile_seconds == compiled
    facts = {
        "steps": engine.steps,
        "steps_with_prompts": engine.steps_with_prompts,
        "ms_per_step": 1e3 * seconds / engine.steps,
        "host_ms_per_step": 1e3 * (seconds - engine.waiting_seconds) / engine.steps,
        "compile_seconds": compiled,
    }
    return [x.answer for x in requests], seconds, facts


def jax_nn(
    query: jax.Array, key: jax.Array, value: jax.Array, *, key_value_seq_lengths: jax.Array
) -> jax.Array:
    on_gpu = jax.default_backend() == "gpu"
    return jax.nn.dot_product_attention(
        query, key, value, query_seq_lengths=jnp.ones_like(key_value_seq_lengths),
        key_value_seq_lengths=key_value_seq_lengths, implementation="cudnn" if on_gpu else "xla",
    )  # fmt: skip


@partial(jax.jit, static_argnames=("config", "room", "attention"))
def _answered(
    params: Any, tokens: jax.Array, lengths: jax.Array, most: jax.Array, config: Config, room: int,
    attention: Callable[..., jax.Array],
):  # fmt: skip
    """The first `most` tokens of the answers to prompts [B, T], int32 [B, room - T], in one
    program.

    Each layer has a separate cache [B, room, K, H], which is written in place. A scan over layers
    would copy its slices of one array, which made a step take 2.5 times as long.
    """
    logits, whole = forward_pass(params, tokens, config)
    rows = jnp.arange(tokens.shape[0])
    first = logits[rows, lengths - 1].argmax(-1).astype(jnp.int32)
    whole = whole.padded_to(room)
    caches = tuple((whole.key[i], whole.value[i]) for i in range(config.layers))
    weights = by_layer(params)["layers"]
    made = jnp.zeros((tokens.shape[0], room - tokens.shape[1]), jnp.int32).at[:, 0].set(first)

    def step(carry: Any) -> Any:
        i, token, at, caches, made = carry
        rotary, x, new = rotary_angles(at[:, None], config), params["embed"][token[:, None]], []
        for layer, (keys, values) in zip(weights, caches, strict=True):
            query, key, value = project(x, layer, rotary, config)
            keys, values = keys.at[rows, at].set(key[:, 0]), values.at[rows, at].set(value[:, 0])
            attended = attention(query, keys, values, key_value_seq_lengths=at + 1)
            x = finish(x, attended, layer, config)
            new.append((keys, values))
        token = logits_of(x, params, config)[:, 0].argmax(-1).astype(jnp.int32)
        return i + 1, token, at + 1, tuple(new), made.at[:, i].set(token)

    carry = (jnp.int32(1), first, lengths, caches, made)
    return jax.lax.while_loop(lambda x: x[0] < most, step, carry)[-1]


def static_batches(
    size: Size, params: Any, attention: Callable[..., jax.Array] = dot_product_attention
) -> tuple[list[list[int]], float, dict[str, Any]]:
    """The answers of static batches, the seconds that they took, and facts about the run.

    Each batch is one program: prompts padded to the longest, then steps with a dense cache until
    the longest answer is done.
    """
    requests, room = requests_of(size), size.prompt + size.most
    answers: list[list[int]] = []
    seconds = compiling = 0.0
    steps = 0
    for first in range(0, len(requests), size.slots):
        batch = requests[first : first + size.slots]
        tokens = np.zeros((size.slots, size.prompt), np.int32)
        lengths = np.ones(size.slots, np.int32)
        for row, request in enumerate(batch):
            tokens[row, : len(request.prompt)] = request.prompt
            lengths[row] = len(request.prompt)

        def answered(most: int, given: Any = (tokens, lengths)) -> np.ndarray:
            return np.asarray(
                _answered(params, *given, np.int32(most), size.config, room, attention)
            )

        if not first:
            started = time.perf_counter()
            answered(2)
            compiling = time.perf_counter() - started
        started = time.perf_counter()
        most = max(x.most for x in batch)
        found = answered(most)
        seconds += time.perf_counter() - started
        steps += most
        answers += [row[: x.most].tolist() for row, x in zip(found, batch, strict=False)]
    return answers, seconds, {"steps": steps, "compile_seconds": compiling}


METHODS: dict[str, Callable[[Size, Any], tuple[list[list[int]], float, dict[str, Any]]]] = {
    "continuous": continuous,
    "static": static_batches,
    "static, jax.nn": partial(static_batches, attention=jax_nn),
}


def main() -> None:
    script = Script("serve", __doc__, rounds=3)
    script.parser.add_argument("--requests", type=int, help="the number of requests")
    args = script.start()
    size = GPU if jax.default_backend() == "gpu" else TINY
    size = dataclasses.replace(size, requests=args.requests or size.requests)
    params, useful = drawn(size.config, size.dtype), sum(x.most for x in requests_of(size))
    names = [*script.chosen(METHODS)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    answers: dict[str, list[list[int]]] = {}
    for number in range(args.rounds):
        for name in names:
            answers[name], took, facts = METHODS[name](size, params)
            seconds[name].append(took)
            row = {"seconds": took, "tokens_per_second": useful / took, **facts}
            script.keep("load", f"{name}, round {number}", row)
    median = {name: statistics.median(x) for name, x in seconds.items()}
    summary: dict[str, Any] = {"requests": size.requests, "slots": size.slots, "tokens": useful}
    for name in names:
        pairs = list(zip(answers[name], answers[names[0]], strict=True))
        summary[name] = {
            "tokens_per_second": useful / median[name],
            "over": median[name] / median[names[0]],
            "same_answers": sum(x == y for x, y in pairs) / len(pairs),
            "same_first_tokens": sum(x[0] == y[0] for x, y in pairs) / len(pairs),
        }
    script.keep("load", f"beside {names[0]}", summary)


if __name__ == "__main__":
    main()
