"""Score real text with SmolLM2, answer a prompt, and show what computed the attention.

Run from the repository root: python -m examples.smollm2 --help
"""

import argparse
import dataclasses
import json
import math
import pathlib
import platform
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from rich.progress import Progress, track
from rich.table import Table

import attn_dispatch
from attn_dispatch.implementation import ImplementationName

from .. import options
from ..screen import console
from . import generate, gguf_weights, scoring
from .model import Config, InputError, Params
from .random_weights import SMOLLM2_135M
from .tokenizer import build_tokenizer, chat_prompt

WINDOW = 1024


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model; `params` have the dtype of the run."""

    config: Config
    params: Params
    tokenizer: tokenizers.Tokenizer
    end_id: int


def main(arguments: list[str] | None = None) -> None:
    """Score, answer, explain and compare, in this order, and print each result."""
    args = _parse(arguments)
    dtype = jnp.dtype(args.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32"))
    device = jax.devices()[0].device_kind
    options.check_file("--json", args.json)
    _check_implementation(args.implementation, dtype)
    console.print(
        f"SmolLM2-135M-Instruct in {dtype.name} on {device}, jax {jax.__version__}\n"
        f"Attention implementation: {args.implementation or 'chosen by attn_dispatch'}"
    )
    try:
        model, weights = _load(args.gguf, dtype)
        windows = scoring.split_windows(
            model.tokenizer.encode(scoring.sample_text()).ids, args.windows, WINDOW
        )
        numbers = _score(model, windows, args.implementation)
        numbers |= _answer(model, args.prompt, args.tokens, args.implementation)
    except InputError as error:
        sys.exit(f"error: {error}")
    _explain(model.config, dtype, args.implementation)
    numbers |= _compare(model, weights, windows[0], args.implementation)
    if args.json:
        about = {
            "dtype": dtype.name,
            "implementation": args.implementation,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "backend": jax.default_backend(),
            "device_kind": device,
        }
        args.json.write_text(json.dumps(about | numbers, indent=2) + "\n", encoding="utf-8")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.smollm2", description=__doc__)
    parser.add_argument("--prompt", default="Why is the sky blue?", help="default: %(default)s")
    parser.add_argument(
        "--tokens", type=options.POSITIVE, default=60, help="longest answer in tokens (default: 60)"
    )
    parser.add_argument(
        "--windows",
        type=options.POSITIVE,
        default=4,
        help=f"windows of {WINDOW} tokens to score (default: 4)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and activations (default: bfloat16 on a GPU, float32 elsewhere)",
    )
    parser.add_argument(
        "--implementation", help="passed on to attn_dispatch (default: it chooses one itself)"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the numbers here")
    parser.add_argument(
        "--gguf",
        type=pathlib.Path,
        metavar="FILE",
        help=f"the model (default: the one inside the package {gguf_weights.PACKAGE})",
    )
    return parser.parse_args(arguments)


def _load(path: pathlib.Path | None, dtype: jnp.dtype) -> tuple[Model, Params]:
    """The model in `dtype`, and its weights in float32 for the comparison at the end."""
    start = time.perf_counter()
    with console.status("Reading and dequantizing the weights"):
        checkpoint = gguf_weights.load(path or gguf_weights.default_path())
        weights = jax.tree.map(jnp.asarray, checkpoint.weights)
        params = jax.tree.map(lambda array: array.astype(dtype), weights)
        tokenizer = build_tokenizer(checkpoint.vocabulary)
    console.print(f"Loaded in {time.perf_counter() - start:.1f} s")
    return Model(checkpoint.config, params, tokenizer, checkpoint.vocabulary.end_id), weights


def _score(
    model: Model, windows: np.ndarray, implementation: ImplementationName | None
) -> dict[str, float]:
    with console.status("Compiling the scoring pass"):
        loss = scoring.window_loss.lower(
            model.params, windows[0], model.config, implementation
        ).compile()
    start = time.perf_counter()
    total = 0.0
    for window in track(windows, "Scoring Python's help topics", console=console):
        total += float(loss(model.params, window))
    seconds = time.perf_counter() - start
    count = len(windows) * WINDOW
    perplexity = math.exp(total / count)
    console.print(
        f"Perplexity {perplexity:.3f} over {count} tokens, {count / seconds:,.0f} tokens/s"
    )
    return {
        "scored_tokens": count,
        "perplexity": perplexity,
        "score_tokens_per_s": count / seconds,
    }


def _answer(
    model: Model, prompt: str, count: int, implementation: ImplementationName | None
) -> dict[str, float | str]:
    ids = model.tokenizer.encode(chat_prompt(prompt)).ids
    with Progress(console=console) as progress:
        task = progress.add_task("Answering the prompt", total=count)
        made = generate.generate(
            model.params,
            model.config,
            ids,
            count,
            model.end_id,
            implementation=implementation,
            on_token=lambda: progress.advance(task),
        )
    text = model.tokenizer.decode(made.ids)
    console.print(f"\n> {prompt}\n{text}\n", markup=False)
    console.print(f"{len(made.ids)} tokens, {made.tokens_per_s:,.1f} tokens/s")
    return {"answer": text, "decode_tokens_per_s": made.tokens_per_s}


def _plan(
    config: Config, dtype: jnp.dtype, implementation: ImplementationName | None
) -> attn_dispatch.Explanation:
    """The explanation of the scoring pass's attention call."""
    query = jax.ShapeDtypeStruct((1, WINDOW, config.heads, config.head_dim), dtype)
    key = value = jax.ShapeDtypeStruct((1, WINDOW, config.kv_heads, config.head_dim), dtype)
    return attn_dispatch.explain(query, key, value, is_causal=True, implementation=implementation)


def _check_implementation(name: ImplementationName | None, dtype: jnp.dtype) -> None:
    """End the process if the implementation cannot run the model. Needs no weights."""
    try:
        plan = _plan(SMOLLM2_135M, dtype, name)
    except ValueError as error:
        sys.exit(f"error: --{error}")
    if plan.chosen_forward is None:
        reasons = "; ".join(str(x) for verdict in plan.forward for x in verdict.reasons)
        sys.exit(f"error: --implementation {name}: {reasons}")


def _explain(config: Config, dtype: jnp.dtype, implementation: ImplementationName | None) -> None:
    """Print the explanation of the scoring pass's attention call."""
    table = _plan(config, dtype, implementation)
    # The console would break the lines of the table.
    print(f"\nThe attention of the scoring pass:\n{table}\n")


def _compare(
    model: Model, weights: Params, window: np.ndarray, implementation: ImplementationName | None
) -> dict[str, float]:
    """Compare the run's logits, and XLA's in the same dtype, with XLA's in float32.

    The difference of the latter is due to the dtype alone; that of the run should be about as
    large.
    """
    dtype = jax.tree.leaves(model.params)[0].dtype.name
    with console.status("Comparing logits with XLA in float32"):
        # GPUs multiply float32 matrices in TF32 by default, which is too coarse for a reference.
        with jax.default_matmul_precision("highest"):
            reference = scoring.window_logits(weights, window, model.config, "xla")
        run, xla = (
            scoring.difference(
                scoring.window_logits(model.params, window, model.config, which), reference
            )
            for which in (implementation, "xla")
        )
    table = Table(title=f"Logits of {WINDOW} tokens against XLA in float32", title_justify="left")
    for heading in ("computed with", "largest difference", "mean", "same top token"):
        table.add_column(heading, justify="left" if heading == "computed with" else "right")
    for name, found in (
        (f"this run, {dtype}", run),
        (f"XLA, {dtype}", xla),
    ):
        table.add_row(name, f"{found.largest:.4g}", f"{found.mean:.4g}", f"{found.same_choice:.2%}")
    console.print(table)
    console.print(
        f"The logits are between {float(reference.min()):.1f} and {float(reference.max()):.1f}"
    )
    return {
        "max_logit_difference": run.largest,
        "mean_logit_difference": run.mean,
        "same_top_token": run.same_choice,
        "max_logit_difference_xla_same_dtype": xla.largest,
        "mean_logit_difference_xla_same_dtype": xla.mean,
        "same_top_token_xla_same_dtype": xla.same_choice,
    }
