"""The packed loss equals that of single documents, and training lowers it. The model is tiny."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for _package in ("optax", "rich"):
    pytest.importorskip(_package, reason=f"{_package} missing: pip install optax rich")

from ..smollm2.model import forward  # noqa: E402
from ..smollm2.random_weights import SMOLLM2_135M, drawn  # noqa: E402
from ..train_packed.packing import Shape, batches, packed  # noqa: E402
from . import __main__ as command  # noqa: E402
from .model import packed_loss  # noqa: E402
from .text import manual  # noqa: E402
from .training import Settings  # noqa: E402

TINY = dataclasses.replace(
    SMOLLM2_135M, layers=2, heads=4, kv_heads=2, head_dim=16, width=64, ffn_width=64, vocab=256,
    context=256,
)  # fmt: skip
SHAPE = Shape(rows=2, row_length=96, max_segments=8, max_documents=12)


def encode(text: str) -> list[int]:
    return [*text.encode()]


def test_packed_loss_is_that_of_whole_documents():
    """The expected loss is computed document by document, with examples/smollm2's forward pass."""
    rng = np.random.default_rng(41)
    documents = [rng.integers(0, 256, x).astype(np.int32) for x in (50, 17, 60, 2, 33)]
    batch = next(batches(documents, dataclasses.replace(SHAPE, max_documents=5), 0))
    assert len(batch.documents) == 5 and len(set(batch.rows)) == 2
    params = drawn(TINY, "float32")
    total, count = packed_loss(
        params, packed(batch, SHAPE), TINY, SHAPE.max_segments, "float32"
    )  # fmt: skip
    assert count == sum(len(x) - 1 for x in documents)
    run = jax.jit(forward, static_argnames="config")
    longest = max(map(len, documents))
    expected = 0.0
    for x in documents:  # tokens past its end have no effect
        tokens = np.pad(x, (0, longest - len(x)), constant_values=7)
        logits, _ = run(params, jnp.asarray(tokens)[None], TINY)
        scores = jax.nn.log_softmax(logits[0, : len(x) - 1])
        expected -= float(scores[np.arange(len(x) - 1), x[1:]].sum())
    assert float(total) == pytest.approx(expected, rel=1e-6)


def test_the_manual_has_both_kinds_of_text():
    text = manual(encode, 200)
    assert len(text.held_out) > 20 and len(text.trained) > 5 * len(text.held_out)
    assert all(2 <= len(x) <= 200 for x in text.trained + text.held_out)
    held_out = {x.tobytes() for x in text.held_out if len(x) == 200}
    assert not held_out & {x.tobytes() for x in text.trained}


def test_the_command_lowers_the_loss(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "SMOLLM2_135M", TINY)
    settings = Settings(SHAPE, "float32", steps=12, evaluated=2)
    monkeypatch.setattr(command, "CPU", settings)
    words = ["--random", "--tokens", "5", "--learning-rate", "1e-2", "--out", str(tmp_path)]
    command.main(words)
    (path,) = tmp_path.glob("finetune-*.json")
    report = json.loads(path.read_text())
    before, after = report["before"], report["after"]
    assert after["trained"] < before["trained"] - 0.5
    assert after["held_out"] < before["held_out"] - 0.5
    assert len(report["losses"]) == 12 and before["sample"] != after["sample"]
    assert "after: loss trained" in capsys.readouterr().out
