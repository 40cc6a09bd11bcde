"""In bfloat16 the logits of steps on pages are as near to float32's as bfloat16 allows.

How near that is, is measured on the same model in bfloat16, which computes each prompt as a whole
with XLA's attention. Both round after every operation, by a relative error of at most 2^-9, but in
different orders. Over some thousand logits, the root mean squares of their errors differ by a few
percent, and the largest errors by chance. So the root mean square may be 1.25 times as large, and
the largest error twice. An attention that is wrong in one of a hundred keys exceeds that.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ..smollm2 import model
from ..smollm2.model import Config, InputError
from ..smollm2.random_weights import SMOLLM2_135M, drawn
from .step import State, Work, advance

TINY = Config(
    layers=3, heads=4, kv_heads=2, head_dim=64, width=128, ffn_width=192, vocab=300, context=128,
    rope_base=1e4, norm_eps=1e-5,
)  # fmt: skip
PROMPTS, PAGE, CHUNK, ROWS, LONGEST, LAST = 50, 16, 24, 64, 80, 8
"""LAST is the number of tokens of each prompt that are decoded: four one by one, then four as a
draft."""


def stepped(params, config: Config, prompts: list[np.ndarray]) -> np.ndarray:
    """The logits [prompts, 8, V] of the last tokens, from chunks and steps on pages."""
    slots, per_slot = len(prompts), -(-LONGEST // PAGE)
    state = State.new(config, slots, slots * per_slot, PAGE, params["embed"].dtype.name)
    params, nothing = model.by_layer(params), np.zeros(slots, np.int32)

    def run(number: np.ndarray, drafts: np.ndarray, tokens: list[np.ndarray], width: int = 1):
        size = ROWS if width == 1 else slots * width
        all_tokens = np.concatenate([*tokens, np.zeros(size - number.sum(), np.int32)])
        packed = Work(number, drafts, nothing, all_tokens).packed()
        return advance(params, state, packed, config, per_slot * PAGE, width)

    read = [x[:-LAST] for x in prompts]
    while any(map(len, read)):
        parts, room = [], ROWS
        for x in read:
            parts.append(x[: min(CHUNK, room)])
            room -= len(parts[-1])
        read = [x[len(part) :] for x, part in zip(read, parts, strict=True)]
        _, state = run(np.array([*map(len, parts)]), nothing, parts)
    found, last = [], np.stack([x[-LAST:] for x in prompts])
    for part in (*np.split(last[:, :4], 4, axis=1), last[:, 4:]):
        width = part.shape[1]
        logits, state = run(np.full(slots, width), np.full(slots, width - 1), [*part], width)
        found.append(np.asarray(logits))
    assert not state.tables.failed
    return np.concatenate(found, axis=1)


def whole(params, config: Config, prompts: list[np.ndarray]) -> np.ndarray:
    """The same logits from XLA, with each prompt computed as a whole."""
    run = jax.jit(functools.partial(model.forward, implementation="xla"), static_argnums=2)
    found = []
    for prompt in prompts:
        tokens = np.zeros(LONGEST, np.int32)
        tokens[: len(prompt)] = prompt
        with jax.default_matmul_precision("highest"):
            logits = run(params, tokens[None], config)[0][0]
        found.append(np.asarray(logits)[len(prompt) - LAST : len(prompt)])
    return np.stack(found)


def check(weights, config: Config) -> None:
    rng = np.random.default_rng(2)
    sizes = rng.integers(LAST + 1, LONGEST + 1, PROMPTS)
    prompts = [rng.integers(0, config.vocab, x).astype(np.int32) for x in sizes]
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    exact = whole(jax.tree.map(lambda x: x.astype(jnp.float32), narrow), config, prompts)
    plain, found = (np.abs(x - exact) for x in (whole(narrow, config, prompts),
                                                stepped(narrow, config, prompts)))  # fmt: skip
    rms = [float(np.sqrt((x**2).mean())) for x in (plain, found)]
    largest = [float(x.max()) for x in (plain, found)]
    print(f"off by {rms[1]:.4g} in the root mean square and {largest[1]:.4g} at most; XLA on whole "
          f"prompts by {rms[0]:.4g} and {largest[0]:.4g}; logits by {exact.std():.3g}")  # fmt: skip
    assert 0 < rms[1] <= 1.25 * rms[0] and largest[1] <= 2 * largest[0]


def test_bfloat16_logits_of_a_small_model_are_near_float32():
    check(drawn(TINY, "float32"), TINY)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="too slow without a GPU")
@pytest.mark.parametrize("is_real", [False, True], ids=["drawn", "real"])
def test_bfloat16_logits_of_smollm2_are_near_float32(is_real):
    if not is_real:
        check(drawn(SMOLLM2_135M, "float32"), SMOLLM2_135M)
        return
    pytest.importorskip("gguf")
    from ..smollm2 import gguf_weights

    try:
        checkpoint = gguf_weights.load(gguf_weights.default_path())
    except InputError as error:
        pytest.skip(str(error))
    check(jax.tree.map(jnp.asarray, checkpoint.weights), checkpoint.config)
