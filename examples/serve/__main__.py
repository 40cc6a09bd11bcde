"""Answer several questions at a time, and print the first answer as it is generated.

Run from the repository root: python -m examples.serve --help
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from attn_dispatch_tools.terminal.ending import run_process

from .. import options
from ..screen import console
from ..smollm2 import gguf_weights
from ..smollm2.model import InputError
from ..smollm2.tokenizer import build_tokenizer, chat_prompt
from .engine import Engine
from .request import Request

QUESTIONS = (
    "Why is the sky blue?", "Name three rivers of Europe.", "What is 17 plus 25?",
    "Write one sentence about the sea.", "How do bees make honey?", "What is a prime number?",
    "Who wrote Hamlet?", "Give me a rhyme on 'light'.",
)  # fmt: skip

SHAPES = """A step is compiled for each of a few shapes: with and without tokens of prompts, with
and without drafts, for caches of 16, 32, 64, … pages up to the longest answer. Rates do not include
compilation."""


def main() -> None:
    args = _parse()
    with console.status("Reading and dequantizing the weights"):
        try:
            checkpoint = gguf_weights.load(gguf_weights.default_path())
        except InputError as error:
            sys.exit(f"error: {error}")
        dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), checkpoint.weights)
        tokenizer = build_tokenizer(checkpoint.vocabulary)
    prompts = [tokenizer.encode(chat_prompt(x)).ids for x in QUESTIONS]
    most = checkpoint.config.context - max(map(len, prompts))
    if args.tokens > most:
        sys.exit(
            f"error: --tokens: expected at most {most}, for which the model has room, "
            f"got {args.tokens}"
        )
    common = next(i for i, x in enumerate(zip(*prompts, strict=False)) if len({*x}) > 1)
    with console.status("Compiling, and computing the prefix of all prompts"):
        engine = Engine(
            params, checkpoint.config, checkpoint.vocabulary.end_id, slots=args.slots,
            prefix=prompts[0][:common], speculate=args.speculate,
        )  # fmt: skip
        engine.prepare(max(map(len, prompts)) + args.tokens)
    requests = [
        # One in four answers may be long.
        Request(
            prompts[i % len(prompts)], args.tokens if i % 4 == 0 else args.tokens // 4 or 1,
            args.temperature, args.top_k, args.top_p, (args.seed + i) % 2**32,
        )
        for i in range(args.requests)
    ]  # fmt: skip
    for request in requests:
        engine.add(request)
    compiled_before, started, made = engine.compile_seconds, time.perf_counter(), 0

    def rate() -> float:
        seconds = time.perf_counter() - started - (engine.compile_seconds - compiled_before)
        return made / seconds

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("tokens", total=sum(x.most for x in requests))

        def on_token(request: Request) -> None:
            nonlocal made
            made += 1
            text = tokenizer.decode(requests[0].answer).replace("\n", " ")[-60:]
            progress.update(task, advance=1, description=f"{rate():,.0f} tokens/s  {text}")

        engine.on_token = on_token
        engine.run()
    for i, request in enumerate(requests[: len(QUESTIONS)]):
        console.print(f"\n> {QUESTIONS[i]}\n{tokenizer.decode(request.answer)}", markup=False)
    drafts = ""
    if engine.drafted:
        share = engine.accepted / engine.drafted
        drafts = f"; {share:.0%} of {engine.drafted} drafted tokens were right"
    console.print(
        f"\n{_many(len(requests), 'answer')}, {_many(made, 'token')} in "
        f"{_many(engine.steps, 'step')}, {rate():,.1f} tokens/s{drafts}; "
        f"{engine.compile_seconds:.1f} s of compilation; {engine.free_pages} pages are free"
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.serve", description=__doc__, epilog=SHAPES
    )
    number, some = ({"type": x, "metavar": "N"} for x in (options.NUMBER, options.POSITIVE))
    parser.add_argument("--requests", **some, default=12, help="default: %(default)s")
    parser.add_argument(
        "--tokens", **some, default=40, help="the longest answer; default: %(default)s"
    )
    parser.add_argument(
        "--slots", **some, default=8, help="requests at a time; default: %(default)s"
    )
    parser.add_argument(
        "--speculate", **number, default=0, choices=range(8),
        help="guess up to N tokens, 0 to 7, from what followed the last tokens earlier in the "
        "text; answers stay the same",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=options.FINITE, default=0.0, help="0: the likeliest token"
    )
    parser.add_argument(
        "--top-k", **number, default=0, help="draw from the N likeliest tokens; 0: all"
    )
    parser.add_argument(
        "--top-p", type=options.SHARE, default=1.0, metavar="P",
        help="draw from the fewest tokens that have probability P together",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=options.SEED, default=0, metavar="N",
        help="the first request's seed; each next one is one larger; default: %(default)s",
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    run_process(main)
