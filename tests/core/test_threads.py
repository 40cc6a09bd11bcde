"""Several threads lower calls at the same time, starting with the process's first call."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.backend import needs_cudnn

CODE = """
import threading
import jax, jax.numpy as jnp
import attn_dispatch
from attn_dispatch import cudnn
from attn_dispatch.cudnn import library

def lowered(length):
    q = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)

    def loss(q, k, v):
        out = attn_dispatch.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, q, q)
    return traced.lower(lowering_platforms=("cuda",)).as_text()

lengths = [128, 256, 128, 256, 384, 128]
texts = [None] * len(lengths)
start = threading.Barrier(len(lengths))

def work(i):
    start.wait()
    texts[i] = lowered(lengths[i])

threads = [threading.Thread(target=work, args=(i,)) for i in range(len(lengths))]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert None not in texts
for length, text in zip(lengths, texts):
    assert text.count(cudnn.BACKWARD_TARGET) == 1 and text == lowered(length), length
stats = library.find().backend.plan_cache_stats()
print(stats["builds"])
"""


@needs_cudnn
def test_threads_lower_as_one_thread_does_and_plan_once():
    """Each call lowers to the text of a single thread, and each of its passes is planned once."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True,
        env=os.environ | {"ATTN_DISPATCH_TARGET": "sm90"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{2 * 3}\n"
