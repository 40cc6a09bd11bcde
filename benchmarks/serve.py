"""Serving a small model: continuous batching, decoding, and the time that the host takes.

usage: python benchmarks/serve.py [--rounds N] [--out FOLDER] [--parts load decode]

On a GPU the model has SmolLM2-135M's shapes, random weights and bfloat16; elsewhere it is a tiny
one in float32.

"load" answers the same requests, whose lengths have a long tail (log-normal), with examples/serve
and with static batches. A static batch is one program: prompts padded to the longest, a dense cache
that is written in place, and steps until the longest answer is done, with our attention or that of
jax.nn. Times do not include compilation. Afterwards the engine's steps are timed one by one, with
tokens of prompts and without, and some are profiled.

"decode" makes 100 tokens for each row of a full batch, in one program and with a call for each
token: on our pages, on a dense cache with our attention, and on one with jax.nn's on cuDNN. The
device time is from a profile of fewer tokens; "gap" is the share of a step's wall time in which no
kernel ran.
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

from attn_dispatch import dot_product_attention
from attn_dispatch_tools.reports.environment import environment

sys.path.append(str(Path(__file__).parents[1]))

from command import save
from examples.serve.engine import Engine
from examples.serve.request import Request
from examples.serve.step import State, Work, advance, follow
from examples.smollm2.model import (
    Cache,
    Config,
    by_layer,
    decode_step,
    finish,
    logits_of,
    project,
    rotary_angles,
)
from examples.smollm2.model import forward as forward_pass
from examples.smollm2.random_weights import SMOLLM2_135M, drawn
from kernel_time import profiled

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
    steps: int
    """The number of tokens that "decode" makes in each row."""
    context: int
    """The number of keys of each row when "decode" begins."""


GPU = Size(SMOLLM2_135M, "bfloat16", 64, 1000, 1024, 192, 64, 100, 1024)
TINY = Size(
    dataclasses.replace(
        SMOLLM2_135M, layers=2, heads=4, kv_heads=2, head_dim=16, width=64, ffn_width=64,
        vocab=128, context=256,
    ),
    "float32", 8, 48, 64, 24, 16, 20, 64,
)  # fmt: skip


def requests_of(size: Size) -> list[Request]:
    rng = np.random.default_rng(0)
    answers = np.clip(rng.lognormal(np.log(size.most / 32), 1.3, size.requests), 1, size.most)
    return [
        Request(rng.integers(0, size.config.vocab, rng.integers(8, size.prompt + 1)).tolist(), n)
        for n in np.ceil(answers).astype(int).tolist()
    ]


def engine_of(size: Size, params: Any) -> tuple[Engine, list[Request]]:
    """An engine whose programs are all compiled, and the requests in its queue."""
    per_request = -(-(size.prompt + size.most) // size.page)
    engine = Engine(
        params, size.config, NO_END, slots=size.slots, page_size=size.page,
        num_pages=size.slots * per_request // 2, chunk=size.prompt,
    )  # fmt: skip
    engine.prepare(size.prompt + size.most)
    requests = requests_of(size)
    for request in requests:
        engine.add(request)
    return engine, requests


def continuous(size: Size, params: Any) -> tuple[list[list[int]], float, dict[str, Any]]:
    """The answers of the engine, the seconds that they took, and facts about the run."""
    engine, requests = engine_of(size, params)
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


def steps(size: Size, params: Any) -> dict[str, Any]:
    """Milliseconds of each kind of step, and a profile of some.

    For the times, each step is read before the next one is sent: "host_ms" until the step is sent,
    "ms" until it is read. The profiled steps run as usual, a step ahead of the host.
    """
    engine, _ = engine_of(size, params)
    kinds: dict[str, list[tuple[float, float]]] = {"with prompts": [], "answers alone": []}
    while not engine.is_idle and engine.steps < 300:
        with_prompts, started = engine.steps_with_prompts, time.perf_counter()
        engine.step()
        sent = time.perf_counter() - started
        engine.drain()
        kind = "answers alone" if engine.steps_with_prompts == with_prompts else "with prompts"
        kinds[kind].append((sent, time.perf_counter() - started))
    found: dict[str, Any] = {}
    for kind, seconds in ((x, y) for x, y in kinds.items() if y):
        sent, whole = (1e3 * statistics.median(x) for x in zip(*seconds, strict=True))
        found[kind] = {"steps": len(seconds), "host_ms": sent, "ms": whole}
    engine, _ = engine_of(size, params)
    while not engine.is_idle and engine.steps < 40:
        engine.step()
    engine.drain()

    def some() -> None:
        for _ in range(10):
            engine.step()
        engine.drain()

    found["profiled"] = profiled(some)
    print(f"steps: {found}", flush=True)
    return found


@partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="cache")
def _decode(
    params: Any, cache: Cache, token: jax.Array, lengths: jax.Array, config: Config,
    attention: Callable[..., jax.Array],
):  # fmt: skip
    logits, cache = decode_step(params, cache, token, lengths, config, attention)
    return logits.argmax(-1).astype(jnp.int32), cache, lengths + 1


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


def load(size: Size, rounds: int, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    params = drawn(size.config, size.dtype)
    useful = sum(x.most for x in requests_of(size))
    found: dict[str, Any] = {"requests": size.requests, "slots": size.slots, "tokens": useful}
    methods = {
        "continuous": continuous,
        "static": static_batches,
        "static, jax.nn": partial(static_batches, attention=jax_nn),
    }
    methods = {name: method for name, method in methods.items() if name not in left_out}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    answers = {}
    for _ in range(rounds):
        for name, method in methods.items():
            answers[name], took, facts = method(size, params)
            seconds[name].append(took)
            found[name] = facts
            print(f"{name}: {useful / took:,.0f} tokens/s, {facts}", flush=True)
    found["of continuous batching"] = steps(size, params)
    for name, x in seconds.items():
        found[name] |= {"seconds": x, "tokens_per_second": useful / statistics.median(x)}
    pairs = list(zip(answers["continuous"], answers["static"], strict=True))
    found["same_answers"] = sum(x == y for x, y in pairs) / len(pairs)
    found["same_first_tokens"] = sum(x[0] == y[0] for x, y in pairs) / len(pairs)
    others = [seconds[x] for x in methods if x != "continuous"]
    # In each round, the time of the fastest static batches over that of continuous batching.
    ratios = [min(x) / y for *x, y in zip(*others, seconds["continuous"], strict=True)]
    found["ratios"] = ratios
    print(
        f"continuous batching is {min(ratios):.2f} to {max(ratios):.2f} times as fast as the "
        f"faster static batch in {rounds} rounds; same answers {found['same_answers']:.3f}",
        flush=True,
    )
    return found


def _on_pages(size: Size) -> tuple[Any, Callable[..., Any]]:
    """A state in which all rows have `size.context` keys on pages in any order, and its step."""
    pages_each = -(-(size.context + size.steps) // size.page)
    state = State.new(
        dataclasses.replace(size.config, context=pages_each * size.page), size.slots,
        size.slots * pages_each, size.page, size.dtype,
    )  # fmt: skip
    order = np.random.default_rng(0).permutation(size.slots * pages_each)
    full = -(-size.context // size.page)
    table = order.reshape(size.slots, pages_each).astype(np.int32)
    used = np.where(np.arange(pages_each) < full, table, -1)
    tables = dataclasses.replace(
        state.tables,
        table=jnp.asarray(used),
        lengths=jnp.full(size.slots, size.context, jnp.int32),
        references=jnp.zeros(order.size, jnp.int32).at[used[used >= 0]].set(1),
    )

    def one(params: Any, state: State, token: jax.Array) -> tuple[State, jax.Array]:
        none = jnp.zeros_like(token)
        packed = Work(jnp.ones_like(token), none, none, token).packed()
        logits, state = advance(params, state, packed, size.config, pages_each * size.page)
        found, tables, last = follow(logits, state.tables, state.last, packed, None)
        return State(tables, last, state.pools), found[:, 0]

    return dataclasses.replace(state, tables=tables), one


def _on_dense(size: Size, attention: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    c = size.config
    shape = (c.layers, size.slots, size.context + size.steps, c.kv_heads, c.head_dim)
    cache = Cache(*(jnp.zeros(shape, size.dtype) for _ in range(2)))
    lengths = jnp.full(size.slots, size.context, jnp.int32)

    def one(params: Any, state: Any, token: jax.Array) -> Any:
        token, cache, lengths = _decode(params, *state[:1], token, state[1], c, attention)
        return (cache, lengths), token

    return (cache, lengths), one


def decode(size: Size, rounds: int) -> dict[str, Any]:
    params = drawn(size.config, size.dtype)
    caches = {
        "pages": _on_pages,
        "dense, ours": partial(_on_dense, attention=dot_product_attention),
        "dense, jax.nn": partial(_on_dense, attention=jax_nn),
    }
    found: dict[str, Any] = {
        "rows": size.slots, "context": size.context, "steps": size.steps
    }  # fmt: skip
    for name, make in caches.items():
        weights = by_layer(params) if name == "pages" else params
        found[name] = _decoded(size, weights, make, rounds, name)
    return found


def _decoded(
    size: Size, params: Any, make: Callable[..., Any], rounds: int, name: str
) -> dict[str, Any]:
    _, one = make(size)
    token = jnp.zeros(size.slots, jnp.int32)
    few = min(size.steps, 10)

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def together(steps: int, params: Any, state: Any, token: jax.Array):
        return jax.lax.fori_loop(0, steps, lambda _, x: one(params, *x), (state, token))

    single = jax.jit(one, donate_argnums=1)

    def one_by_one(steps: int, params: Any, state: Any, token: jax.Array):
        for _ in range(steps):
            state, token = single(params, state, token)
        return state, token

    row: dict[str, Any] = {}
    for kind, run in {"one program": together, "a call each": one_by_one}.items():

        def timed(steps: int, run: Any = run) -> float:
            state = jax.block_until_ready(make(size)[0])
            started = time.perf_counter()
            jax.block_until_ready(run(steps, params, state, token))
            return time.perf_counter() - started

        timed(size.steps), timed(few)
        times = [timed(size.steps) for _ in range(rounds)]
        wall = statistics.median(times)
        row[kind] = {"seconds": times, "tokens_per_second": size.steps * size.slots / wall}
        state = jax.block_until_ready(make(size)[0])
        row[kind] |= profiled(partial(_waited_for, run, few, params, state, token))
        row[kind]["profiled_steps"] = few
        if row[kind].get("busy_seconds"):
            row[kind]["gap"] = 1 - row[kind]["busy_seconds"] / few / (wall / size.steps)
        facts = {x: row[kind].get(x) for x in ("gap", "kernels", "launches", "reason")}
        print(f"{name}, {kind}: {row[kind]['tokens_per_second']:,.0f} tokens/s, "
              f"{1e3 * wall / size.steps:.3f} ms a step, {facts}", flush=True)  # fmt: skip
    return row


def _waited_for(call: Callable[..., Any], *arguments: Any) -> Any:
    return jax.block_until_ready(call(*arguments))


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("--requests", type=int, help="the number of requests of the load")
    parser.add_argument(
        "--without-jax-nn",
        action="store_true",
        help="leave static batches on jax.nn out of the load",
    )
    parser.add_argument("--parts", nargs="+", default=["load", "decode"])
    args = parser.parse_args()
    size = GPU if jax.default_backend() == "gpu" else TINY
    if args.requests:
        size = dataclasses.replace(size, requests=args.requests)
    report: dict[str, Any] = {"environment": environment()}
    for part in args.parts:
        without = ("static, jax.nn",) if args.without_jax_nn else ()
        parts = {"load": partial(load, left_out=without), "decode": decode}
        report[part] = parts[part](size, args.rounds)
        save("serve", report, args.out)


if __name__ == "__main__":
    main()
