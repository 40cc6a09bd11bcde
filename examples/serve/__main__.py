"""Answer a number of questions at a time, and stream the first.

Run from the repository root: python -m examples.serve --help
"""

import argparse
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ..smollm2 import gguf_weights
from ..smollm2.tokenizer import build_tokenizer, chat_prompt
from .engine import Engine, Request

QUESTIONS = (
    "Why is the sky blue?", "Name three rivers of Europe.", "What is 17 plus 25?",
    "Write one sentence about the sea.", "How do bees make honey?", "What is a prime number?",
    "Who wrote Hamlet?", "Give me a rhyme on 'light'.",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.serve", description=__doc__)
    parser.add_argument("--requests", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=40, help="of the longest answer")
    parser.add_argument("--slots", type=int, default=8, help="requests at a time")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    console = Console()
    with console.status("Reading and dequantizing the weights"):
        checkpoint = gguf_weights.load(gguf_weights.default_path())
        dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), checkpoint.weights)
        tokenizer = build_tokenizer(checkpoint.vocabulary)
    prompts = [tokenizer.encode(chat_prompt(x)).ids for x in QUESTIONS]
    common = next(i for i, x in enumerate(zip(*prompts, strict=False)) if len({*x}) > 1)
    with console.status("Compiling, and reading what all prompts begin with"):
        engine = Engine(
            params, checkpoint.config, checkpoint.vocabulary.end_id, slots=args.slots,
            prefix=prompts[0][:common],
        )  # fmt: skip
    requests = [
        # A long tail: one in four answers may be long.
        Request(prompts[i % len(prompts)], args.tokens if i % 4 == 0 else args.tokens // 4 or 1,
                args.temperature)
        for i in range(args.requests)
    ]  # fmt: skip
    for request in requests:
        engine.add(request)
    made, started = 0, time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("tokens", total=sum(x.most for x in requests))

        def on_token(request: Request) -> None:
            nonlocal made
            made += 1
            text = tokenizer.decode(requests[0].answer).replace("\n", " ")[-60:]
            rate = made / (time.perf_counter() - started)
            progress.update(task, advance=1, description=f"{rate:,.0f} tokens/s  {text}")

        engine.on_token = on_token
        engine.run()
    seconds = time.perf_counter() - started
    for i, request in enumerate(requests[: len(QUESTIONS)]):
        console.print(f"\n> {QUESTIONS[i]}\n{tokenizer.decode(request.answer)}", markup=False)
    console.print(
        f"\n{len(requests)} answers, {made} tokens in {engine.steps} steps, {made / seconds:,.1f} "
        f"tokens/s with compilation; {engine.free_pages} pages are free",
        highlight=False,
    )


if __name__ == "__main__":
    main()
