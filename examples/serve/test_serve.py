"""Answers equal those of the whole sequence computed at once, whichever requests are batched."""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import serving

from ..smollm2 import gguf_weights, model
from ..smollm2.model import Config, InputError
from . import __main__ as command
from .drafts import lookup
from .engine import Engine
from .request import Request
from .sampling import Sampling, choose
from .step import FAILED, LAST, Work, follow

CONFIG = Config(
    layers=2, heads=4, kv_heads=2, head_dim=8, width=24, ffn_width=32, vocab=50, context=96,
    rope_base=1e4, norm_eps=1e-5,
)  # fmt: skip
END, NO_END = 49, -1


@pytest.fixture(scope="module")
def params():
    """Random weights of a small model."""
    c, rng = CONFIG, np.random.default_rng(0)
    shapes = {
        "attn_norm": (c.width,), "ffn_norm": (c.width,),
        "attn_q": (c.width, c.heads * c.head_dim), "attn_k": (c.width, c.kv_heads * c.head_dim),
        "attn_v": (c.width, c.kv_heads * c.head_dim),
        "attn_output": (c.heads * c.head_dim, c.width),
        "ffn_gate": (c.width, c.ffn_width), "ffn_up": (c.width, c.ffn_width),
        "ffn_down": (c.ffn_width, c.width),
    }  # fmt: skip

    def drawn(*shape):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), jnp.float32)

    layers = {name: drawn(c.layers, *shape) for name, shape in shapes.items()}
    return {"embed": 4 * drawn(c.vocab, c.width), "output_norm": drawn(c.width), "layers": layers}


@functools.partial(jax.jit, static_argnames="config")
def _likeliest(params, tokens, config):
    logits, _ = model.forward(params, tokens[None], config, implementation="xla")
    return logits[0].argmax(-1)


def recomputed(
    params, prompt: list[int], most: int, config=CONFIG, end: int = END, length: int = 96
) -> list[int]:
    """The answer, for each token of which the whole sequence is computed again."""
    answer: list[int] = []
    while len(answer) < most:
        tokens = prompt + answer
        padded = np.zeros(length, np.int32)
        padded[: len(tokens)] = tokens
        following = int(_likeliest(params, padded, config)[len(tokens) - 1])
        if following == end:
            break
        answer.append(following)
    return answer


def prompts(count: int, prefix: list[int] | None = None) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [
        (prefix or []) + rng.integers(0, END, rng.integers(1, 30)).tolist() for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("chunk", "has_prefix", "speculate"),
    [(5, True, 0), (64, False, 0), (5, True, 7), (64, False, 3)],
)
def test_answers_are_those_of_full_recomputation(params, chunk, has_prefix, speculate):
    """50 prompts of random lengths; most answers are short, some are long, and some end early."""
    prefix = list(range(3, 26)) if has_prefix else []
    engine = Engine(
        params, CONFIG, END, slots=6, page_size=4, num_pages=80, chunk=chunk, prefix=prefix,
        speculate=speculate,
    )  # fmt: skip
    free_before = engine.free_pages
    requests = [Request(x, most=30 if i % 5 == 0 else 6) for i, x in enumerate(prompts(50, prefix))]
    for request in requests:
        engine.add(request)
    engine.run()
    for request in requests:
        assert request.answer == recomputed(params, request.prompt, request.most)
    assert engine.free_pages == free_before
    if speculate:
        assert 0 < engine.accepted < engine.drafted


@pytest.mark.parametrize(("has_prefix", "speculate"), [(False, 0), (True, 3)])
def test_nothing_is_compiled_while_serving(params, has_prefix, speculate):
    """After `prepare` no request compiles anything; without it some do."""
    counted: list[str] = []

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            counted.append(event)

    prefix = list(range(3, 26)) if has_prefix else []
    requests = [Request(x, most=1 + 8 * i) for i, x in enumerate(prompts(6, prefix))]
    numbers = []
    for is_prepared in (True, False):
        jax.clear_caches()
        engine = Engine(
            params, CONFIG, END, slots=3, page_size=4, num_pages=90, chunk=5, prefix=prefix,
            speculate=speculate,
        )  # fmt: skip
        if is_prepared:
            engine.prepare()
        jax.monitoring.register_event_duration_secs_listener(count)
        counted.clear()
        for x in requests:
            engine.add(dataclasses.replace(x, answer=[], done=0))
        engine.run()
        numbers.append(len(counted))
        jax.monitoring.unregister_event_duration_listener(count)
    assert numbers[0] == 0 and numbers[1] > 0


def test_a_thousand_requests_leave_no_page_in_use(params):
    engine = Engine(
        params, CONFIG, END, slots=20, page_size=4, num_pages=120, chunk=30, speculate=2
    )
    for i, prompt in enumerate(prompts(1000)):
        engine.add(Request(prompt, most=1 + i % 4, temperature=float(i % 2)))
    engine.run()
    assert engine.free_pages == 120


def test_sampling_is_the_same_for_the_same_seed(params):
    answers = []
    for seed in (0, 0, 1):
        engine = Engine(params, CONFIG, END, slots=3, page_size=4, num_pages=60)
        requests = [Request(x, most=12, temperature=2.0, seed=seed) for x in prompts(4)]
        for request in requests:
            engine.add(request)
        engine.run()
        answers.append([x.answer for x in requests])
    assert answers[0] == answers[1] != answers[2]


def answered(engine, requests) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    engine.run()
    return [x.answer for x in requests]


@pytest.mark.parametrize("speculate", [0, 4])
def test_samples_do_not_depend_on_other_requests_or_drafts(params, speculate):
    """With top_k of 1, or a top_p that the likeliest token reaches, that token is taken."""

    def new_requests() -> list[Request]:
        kinds: tuple[dict[str, Any], ...] = (
            {},
            {"temperature": 0.7},
            {"temperature": 2.0, "top_k": 5},
            {"temperature": 1.0, "top_p": 0.6},
            {"temperature": 3.0, "top_k": 1},
            {"temperature": 3.0, "top_p": 1e-6},
        )
        return [Request(x * 2, 20, seed=i % 3, **kinds[i % 6]) for i, x in enumerate(prompts(12))]

    alone = Engine(params, CONFIG, END, slots=1, page_size=4, num_pages=60)
    expected = answered(alone, new_requests())
    engine = Engine(params, CONFIG, END, slots=7, page_size=4, num_pages=200, speculate=speculate)
    requests = new_requests()
    assert answered(engine, requests) == expected
    for request in requests[4::6] + requests[5::6]:
        assert request.answer == recomputed(params, request.prompt, request.most)
    drawn = [x.answer for x in requests if x.top_k == 5 or 0.5 < x.top_p < 1]
    assert drawn != [recomputed(params, x.prompt, 20) for x in requests if x.answer in drawn]


@pytest.mark.parametrize(("speculate", "has_prefix"), [(3, False), (0, True)])
def test_running_out_of_pages_is_an_error_and_changes_nothing(params, speculate, has_prefix):
    """More requests are admitted than there is room for, so that pages run out while the third
    prompt is read, and again later. The remaining requests continue as if they had been alone, even
    if the next step had already been sent."""
    prefix = [7, 8, 9, 10] if has_prefix else []
    alone = Engine(params, CONFIG, NO_END, slots=1, page_size=4, num_pages=60)
    engine = Engine(
        params, CONFIG, NO_END, slots=3, page_size=4, num_pages=12, chunk=6, speculate=speculate,
        prefix=prefix,
    )  # fmt: skip
    engine._admission._needed = lambda request: 0
    free_before, rng = engine.free_pages, np.random.default_rng(5)
    for seed in range(6):
        drawn = rng.integers(0, END, (3, 4)).tolist()
        given = [prefix + (x * 9)[:size] for x, size in zip(drawn, (4, 8, 30), strict=True)]
        requests = [
            Request(x, most, temperature=0.3 * (seed % 3), seed=seed)
            for x, most in zip(given, (30, 30, 10), strict=True)
        ]
        expected = answered(alone, [dataclasses.replace(x, answer=[]) for x in requests])
        for request in requests:
            engine.add(request)
        failures = 0
        for request in requests:
            try:
                engine.run()
            except serving.OutOfPages as error:
                assert "free ones of 4 tokens" in str(error)
                with pytest.raises(serving.OutOfPages):
                    engine.run()
                failures += 1
                engine.cancel(request)
        assert failures == 2 and engine.is_idle and requests[2].answer == expected[2]
        for request, whole in zip(requests, expected, strict=True):
            assert request.answer == whole[: len(request.answer)]
        assert engine.free_pages == free_before


@pytest.mark.parametrize("failed", [False, True])
def test_a_failed_step_changes_nothing(failed):
    """Two guesses are wrong. After a failed step lengths and last tokens are as before it."""
    tables = serving.grow(serving.new_tables(2, 4, 8, 4), jnp.array([5, 3]))
    tables = dataclasses.replace(tables, failed=jnp.array(failed))
    given = ([3, 1], [2, 0], [0, 0], [LAST, 1, 2, LAST])
    logits = jnp.zeros((2, 3, 10)).at[..., 7].set(1)
    found, after, last = follow(
        logits, tables, jnp.array([4, 6]), Work(*map(np.array, given)).packed(), None
    )
    assert found[:, -1].tolist() == [FAILED if failed else 0] * 2
    assert after.lengths.tolist() == ([5, 3] if failed else [3, 3])
    assert last.tolist() == ([4, 6] if failed else [7, 7])


def test_prompts_of_several_requests_are_read_in_a_step(params):
    """Steps read 15 tokens of prompts of 4, 9, 6 and 20: the last two continue in later steps."""
    engine = Engine(params, CONFIG, END, slots=4, page_size=4, num_pages=60, chunk=15)
    requests = [Request([*range(i, i + n)], 9) for i, n in enumerate((4, 9, 6, 20))]
    for request in requests:
        engine.add(request)
    done = []
    while engine._admission.waiting or engine._admission.reading:
        engine.step()
        done.append([x.done for x in requests])
    assert done == [[4, 9, 2, 0], [4, 9, 6, 11], [4, 9, 6, 20]]
    engine.run()
    assert engine.steps_with_prompts == 3 and engine.steps == 11
    for request in requests:
        assert request.answer == recomputed(params, request.prompt, 9)


def test_the_prompt_that_waited_longest_is_read_first(params):
    """The long prompt is read before the late one, although its slot is behind that one's."""
    engine = Engine(params, CONFIG, END, slots=2, page_size=4, num_pages=60, chunk=4)
    short, long, late = Request([1, 2], 1), Request([*range(20)], 2), Request([5, 6, 7], 2)
    for request in (short, long, late):
        engine.add(request)
    while not late.done:
        engine.step()
        assert long.is_decoding or not late.done
    engine.run()
    for request in (short, long, late):
        assert request.answer == recomputed(params, request.prompt, request.most)


@pytest.mark.parametrize("speculate", [0, 2])
def test_a_step_is_sent_before_the_one_before_is_read(params, speculate):
    """With drafts each step is read before the next is sent, because drafts need its results."""
    engine = Engine(params, CONFIG, END, slots=3, page_size=4, num_pages=60, speculate=speculate)
    order: list[str] = []
    send, read = engine._send, engine._read
    engine._send = lambda parts: (order.append("send"), send(parts))[1]
    engine._read = lambda step: (order.append("read"), read(step))[1]
    engine.add(Request([1, 2, 3], 4))
    engine.run()
    at_once = ["send", "read"] * engine.steps
    assert order == (at_once if speculate else ["send", *at_once[:-2], "read"])


def test_a_request_is_cancelled_after_a_step_was_sent(params):
    """The step's result for it is dropped, its slot goes to another request, its pages are free."""
    engine = Engine(params, CONFIG, END, slots=2, page_size=4, num_pages=60)
    requests = [Request(x, 20) for x in prompts(4)]
    for request in requests:
        engine.add(request)
    for _ in range(5):
        engine.step()
    gone = requests[0]
    before = list(gone.answer)
    assert gone.coming == 1
    engine.cancel(gone)
    engine.run()
    assert gone.answer == before == recomputed(params, gone.prompt, 20)[: len(before)]
    for request in requests[1:]:
        assert request.answer == recomputed(params, request.prompt, 20)
    assert engine.free_pages == 60


def test_drafts_are_what_followed_the_last_tokens_before():
    assert lookup([1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]
    assert lookup([5, 2, 3, 8, 1, 2, 3, 9, 4, 2, 3], 3) == [9, 4, 2]  # the latest of two
    assert lookup([7, 2, 3, 8, 1, 1, 2, 3], 5) == [8, 1, 1, 2, 3]
    assert lookup([1, 2, 3], 3) == lookup([], 3) == lookup([4, 4, 1], 3) == []


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))[None, None]

    def shares(**options) -> np.ndarray:
        chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | options
        sampling = Sampling(
            jnp.full(1, chosen["temperature"], jnp.float32),
            jnp.full(1, chosen["top_k"], jnp.int32),
            jnp.full(1, chosen["top_p"], jnp.float32),
            jnp.zeros(1, jnp.uint32),
        )
        drawn = choose(jnp.tile(logits, (1, 4000, 1)), sampling, jnp.arange(4000)[None])
        return np.bincount(np.asarray(drawn)[0], minlength=4) / 4000

    np.testing.assert_allclose(shares(), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(shares(top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(top_p=0.7), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(top_p=0.4), [1, 0, 0, 0])
    np.testing.assert_allclose(shares(top_p=0.0), [1, 0, 0, 0])
    wide = np.sqrt([0.5, 0.3, 0.15, 0.05])
    np.testing.assert_allclose(shares(temperature=2.0), wide / wide.sum(), atol=0.03)


def test_what_can_never_be_answered_is_refused_at_once(params):
    engine = Engine(params, CONFIG, END, slots=2, page_size=4, num_pages=10)
    for prompt, most in (([], 3), ([1] * 90, 10), ([1] * 30, 11)):
        with pytest.raises(InputError, match=r"at most 40 \(model: 96, cache: 40\), got a"):
            engine.add(Request(prompt, most))
    engine.add(Request([1] * 30, 10))
    engine.run()


PACKAGES = ("gguf", "tokenizers", "rich")


def real_model():
    for package in PACKAGES:
        pytest.importorskip(package)
    try:
        return gguf_weights.load(gguf_weights.default_path())
    except InputError as error:
        pytest.skip(str(error))


def test_the_command_answers():
    """The command runs with drafts, which needs all programs that it has without them, and more."""
    for package in PACKAGES:
        pytest.importorskip(package)
    try:
        gguf_weights.default_path()
    except InputError as error:
        pytest.skip(str(error))
    options = ("--requests", "2", "--tokens", "8", "--speculate", "4")
    text = subprocess.run(
        (sys.executable, "-m", "examples.serve", *options), cwd=Path(__file__).parents[2],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert "> Why is the sky blue?" in text and "2 answers, 10 tokens in" in text


def test_the_real_model_answers_as_if_recomputed():
    """Three repetitive prompts, with chunks, a prefix and drafts."""
    checkpoint = real_model()
    from ..smollm2.tokenizer import build_tokenizer

    config, end = checkpoint.config, checkpoint.vocabulary.end_id
    params = jax.tree.map(jnp.asarray, checkpoint.weights)
    tokenizer = build_tokenizer(checkpoint.vocabulary)
    texts = ("one two three four, one two three four, one two three", "The sea is", "2, 4, 6, 8,")
    prompts = [tokenizer.encode(f"Go on: {x}").ids for x in texts]
    engine = Engine(
        params, config, end, slots=3, page_size=4, num_pages=64, chunk=8, speculate=4,
        prefix=prompts[0][:3],
    )  # fmt: skip
    answers = answered(engine, [Request(x, 12) for x in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        # By causality, one pass over prompt and answer has the likeliest token after each part.
        padded = np.zeros(64, np.int32)
        padded[: len(prompt + answer)] = prompt + answer
        likeliest = _likeliest(params, padded, config)[len(prompt) - 1 :].tolist()
        ends = [] if len(answer) == 12 else [end]
        assert likeliest[: len(answer + ends)] == answer + ends
    assert engine.accepted > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "0"], "argument --requests: expected an int above 0, got 0"),
        (["--slots", "-1"], "argument --slots: expected an int above 0, got -1"),
        (["--top-k", "1.5"], "argument --top-k: expected an int of 0 or more, got 1.5"),
        (["--temperature", "nan"], "argument --temperature: expected 0 or more, got nan"),
        (["--top-p", "0"], "argument --top-p: expected a number above 0, up to 1, got 0"),
    ],
)
def test_wrong_options_fail_before_anything_is_loaded(options, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["serve", *options])
    with pytest.raises(SystemExit):
        command.main()
    assert message in capsys.readouterr().err
