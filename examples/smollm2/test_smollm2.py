"""The tests of the example, skipped if the weights or the packages that read them are missing."""

import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for _package in ("gguf", "tokenizers", "rich"):
    pytest.importorskip(
        _package, reason=f"{_package} missing: pip install -r examples/smollm2/requirements.txt"
    )

from . import gguf_weights, model, scoring  # noqa: E402
from .generate import generate  # noqa: E402
from .tokenizer import build_tokenizer, chat_prompt  # noqa: E402

try:
    PATH = gguf_weights.default_path()
except model.InputError as error:
    pytest.skip(str(error), allow_module_level=True)

LENGTH = 64

# If no kernel accepts lengths, the decoding step warns, which is no error here.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def checkpoint():
    """The file's contents, with its weights on the device in float32."""
    found = gguf_weights.load(PATH)
    return gguf_weights.Checkpoint(
        found.config, jax.tree.map(jnp.asarray, found.weights), found.vocabulary
    )


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    """The model's tokenizer."""
    return build_tokenizer(checkpoint.vocabulary)


@pytest.fixture(scope="module")
def forward(checkpoint):
    """(tokens [2, LENGTH]) -> logits and cache, compiled once for all tests."""
    run = jax.jit(model.forward, static_argnames="config")
    return lambda tokens: run(checkpoint.weights, tokens, checkpoint.config)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    """Two rows of English [2, LENGTH]."""
    ids = tokenizer.encode(pydoc_data.topics.topics["assert"]).ids
    return jnp.array(ids[: 2 * LENGTH]).reshape(2, LENGTH)


@pytest.fixture(autouse=True)
def full_precision():
    """GPUs multiply float32 in TF32 by default, too coarse for these tolerances."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize(
    "text",
    [
        "Plain English, isn't it?",
        "In 2024, 3.14159 of 1000000 \u0663",
        "h\u00e9llo w\u00f6rld \u4e16\u754c \U0001f642 \u2014 na\u00efve",
        "  indented\n\n\tdef f(x):\r\n    return x  ",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
        chat_prompt("Why is the sky blue?"),
    ],
)
def test_tokenizer_round_trip(tokenizer, text):
    """Decoding gives back what was encoded, byte for byte."""
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_splits(tokenizer):
    """Every digit is one token, and so is every special token."""
    assert tokenizer.encode("12345").tokens == list("12345")
    assert tokenizer.encode("The cat sat").tokens == ["The", "\u0120cat", "\u0120sat"]
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids[::2] == [1, 2]


def test_rotary_product_depends_on_distance_only(checkpoint):
    """The property that makes rotary positions relative."""
    query, key = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 64)).astype(np.float32)

    def product(at_query, at_key):
        turned = [
            model._rotate(x, model.rotary_angles(jnp.array([[at]]), checkpoint.config))
            for x, at in ((query, at_query), (key, at_key))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(17, 5) == pytest.approx(product(112, 100), abs=1e-3)
    assert product(17, 5) != pytest.approx(product(17, 9), abs=1e-3)


def test_later_token_never_changes_earlier_logits(forward, tokens):
    """Causality of the whole model, to the last bit."""
    before, _ = forward(tokens)
    after, _ = forward(tokens.at[:, 40].add(1))
    np.testing.assert_array_equal(before[:, :40], after[:, :40])
    assert np.all(np.any(before[:, 40:] != after[:, 40:], axis=-1))


def test_decode_equals_forward(checkpoint, forward, tokens):
    """Token by token gives the same logits, for rows of unequal length and a dirty buffer."""
    expected, cache = forward(tokens)
    lengths = jnp.array([40, 23])
    unused = jnp.arange(LENGTH) >= lengths[:, None]  # [B, S]
    cache = jax.tree.map(lambda x: jnp.where(unused[None, :, :, None, None], 9.0, x), cache)
    step = jax.jit(model.decode_step, static_argnames="config")
    rows = jnp.arange(2)
    for _ in range(8):
        logits, cache = step(
            checkpoint.weights, cache, tokens[rows, lengths], lengths, checkpoint.config
        )
        np.testing.assert_allclose(logits, expected[rows, lengths], atol=2e-3)
        lengths = lengths + 1


def test_generate_picks_the_likeliest_tokens(checkpoint, forward, tokens):
    """The tokens generated are those that one pass over the finished text finds likeliest."""
    prompt = tokens[0, :56].tolist()
    made = generate(checkpoint.weights, checkpoint.config, prompt, LENGTH - 56, end_id=-1)
    logits, _ = forward(jnp.array([prompt + made.ids] * 2))
    np.testing.assert_array_equal(made.ids, logits[0, 55:-1].argmax(-1))


def test_generate_stops_at_the_end_and_refuses_too_much(checkpoint, tokens):
    """The token that ends an answer is no part of it, and the context is the limit."""
    prompt = tokens[0, :56].tolist()
    args = checkpoint.weights, checkpoint.config, prompt
    third = generate(*args, LENGTH - 56, end_id=-1).ids[2]
    made = generate(*args, LENGTH - 56, end_id=third)
    assert third not in made.ids and len(made.ids) <= 2
    with pytest.raises(model.InputError, match="fewer tokens"):
        generate(*args, checkpoint.config.context, end_id=-1)


def test_english_has_a_low_perplexity(checkpoint, tokenizer):
    """The weights, the rotary layout and the tokenizer fit together."""
    ids = tokenizer.encode(scoring.sample_text()).ids
    window = scoring.split_windows(ids, 1, 256)[0]
    loss = scoring.window_loss(checkpoint.weights, window, checkpoint.config)
    assert float(jnp.exp(loss / 256)) < 60


def test_split_windows_refuses_short_text():
    """The message says how many windows there is text for."""
    with pytest.raises(model.InputError, match="2 windows or fewer"):
        scoring.split_windows(list(range(9)), 3, 4)


def test_a_missing_or_foreign_file_is_refused(tmp_path):
    """A wrong --gguf is answered with what to do."""
    with pytest.raises(model.InputError, match="--gguf"):
        gguf_weights.load(tmp_path / "absent.gguf")
    (tmp_path / "text.gguf").write_text("This is text, and long enough to have a header.")
    with pytest.raises(model.InputError, match="no GGUF file"):
        gguf_weights.load(tmp_path / "text.gguf")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--implementation", "foo"], "error: --implementation: expected None, one of"),
        (["--implementation", "cudnn"], "error: --implementation cudnn: cuDNN runs on NVIDIA GPUs"),
        (["--json", "/proc/none/x"], "error: --json: /proc/none/x: no such file or directory"),
    ],
)
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN runs it there")
def test_impossible_options_fail_before_the_weights_are_read(words, message):
    from .main import main

    with pytest.raises(SystemExit) as stop:
        main([*words, "--gguf", "/nowhere"])
    assert str(stop.value).startswith(message)
