"""`dot_product_attention` and `explain`: shapes, dtypes and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import (
    assert_kernels,
    dot_product_attention,
    dropout_mask,
    explain,
    explain_program,
)

Q = np.zeros((2, 3, 4, 8), np.float32)
KV = np.zeros((2, 5, 2, 8), np.float32)
KEY = jax.random.key(0)
FIVE_DIMS = dict.fromkeys(("query", "key", "value"), np.zeros((2, 3, 6, 2, 8), np.float32))


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def attention(**change: Any) -> Any:
    return dot_product_attention(**({"query": Q, "key": KV, "value": KV} | change))


def traced(name: str, value: Any) -> Any:
    """A call in jit whose static argument is traced."""
    return jax.jit(lambda x: attention(**{name: x}))(value)


ROWS = """
# query, key, value
attention(query=None)
attention(value=None)
attention(query=array(4, 8))
attention(key=array(5))
attention(value=array())
attention(query=Q.astype(int))
attention(query=Q.astype(np.complex64))
attention(key=KV.astype(bool))
attention(key=KV.astype(np.float16))
attention(value=KV.astype(jnp.bfloat16))
attention(key=KV.astype(np.int8), value=KV.astype(np.int8))
attention(key=KV.astype(jnp.float8_e4m3fn), value=KV.astype(jnp.float8_e4m3fn))
attention(key=KV.astype(jnp.bfloat16), value=KV.astype(jnp.bfloat16))
attention(key=array(3, 5, 2, 8))
attention(key=array(1, 5, 2, 8))
attention(key=array(5, 2, 8))
attention(key=array(1, 2, 5, 2, 8))
attention(key=array(2, 5, 2, 7))
attention(value=array(2, 6, 2, 8))
attention(value=array(2, 5, 4, 8))
attention(value=array(3, 5, 2, 8))
attention(query=array(2, 3, 5, 8))
attention(query=array(2, 3, 1, 8))
attention(key=array(2, 5, 0, 8), value=array(2, 5, 0, 8))
attention(bias='alibi')
attention(dropout_rate=0.1, dropout_key='seed')

# bias and mask
attention(mask=array(3, 5, dtype=np.int32))
attention(mask=array(3, 5))
attention(bias=array(3, 5, dtype=bool))
attention(bias=array(3, 5, dtype=np.int8))
attention(bias=array(3, 4, 3, 5))
attention(bias=array(2, 2, 3, 5))
attention(bias=array(4, 3))
attention(bias=array(5, 3))
attention(bias=array(2))
attention(bias=array(1, 2, 4, 3, 5))
attention(bias=array(0))
attention(mask=array(2, 4, 1, 3, 5, dtype=bool))

# lengths
attention(query_seq_lengths=[1.0, 2.0])
attention(key_value_seq_lengths=[True, False])
attention(query_seq_lengths=[1, 2, 3])
attention(key_value_seq_lengths=4)
attention(key_value_seq_lengths=array(2, 5, dtype=int))
attention(key_value_seq_lengths=[[4, 4]])

# segment ids
attention(query_segment_ids=array(2, 3), key_value_segment_ids=array(2, 5, dtype=int))
attention(query_segment_ids=array(2, 5, dtype=int), key_value_segment_ids=array(2, 5, dtype=int))
attention(query_segment_ids=array(2, 3, dtype=int), key_value_segment_ids=array(5, dtype=int))
attention(query_segment_ids=array(2, 3, dtype=int))
attention(key_value_segment_ids=array(2, 5, dtype=int))
attention(max_segments=2 ** 27 + 1, query_segment_ids=array(2, 3, dtype=int),
    key_value_segment_ids=array(2, 5, dtype=int))
attention(max_segments=3)
attention(max_segments=0)
attention(max_segments=-1)
attention(max_segments=2.0)
attention(max_segments=True)
attention(max_segments='many')

# per head
attention(alibi_slopes=array(4, dtype=int))
attention(alibi_slopes=array(2))
attention(alibi_slopes=array(1, 4))
attention(sinks=array(2, 2))
attention(sinks=array())
attention(sinks=array(4, dtype=bool))

# dropout
attention(dropout_rate=0.1)
attention(dropout_rate=1.0, dropout_key=KEY)
attention(dropout_rate=-0.1)
attention(dropout_rate=float('nan'))
attention(dropout_rate=None)
attention(dropout_rate='half')
attention(dropout_rate=0.1, dropout_key=7)
attention(dropout_rate=0.1, dropout_key=array(2))
attention(dropout_rate=0.1, dropout_key=array(3, 2, dtype=np.uint32))
attention(dropout_rate=0.1, dropout_key=array(3, dtype=np.uint32))
attention(dropout_rate=0.1, dropout_key=jax.random.split(KEY, 3))

# numbers
attention(scale=float('nan'))
attention(scale=float('inf'))
attention(scale='big')
attention(scale=np.zeros(2))
attention(logits_soft_cap=0.0)
attention(logits_soft_cap=-2)
attention(logits_soft_cap=float('inf'))
attention(logits_soft_cap=[1.0])
attention(local_window_size=-1)
attention(local_window_size=(1, -1))
attention(local_window_size=(1,))
attention(local_window_size=(1, 2, 3))
attention(local_window_size=())
attention(local_window_size=1.5)
attention(local_window_size=(1, 2.0))
attention(local_window_size='ab')
attention(local_window_size=(None, '1'))
attention(local_window_size=True)

# choices
attention(is_causal=1)
attention(is_causal=None)
attention(scale=1e+39)
attention(scale=-1e-40)
attention(scale='0.5')
attention(scale=True)
attention(logits_soft_cap=1e+300)
attention(deterministic_backward='yes')
attention(return_residual=1)
attention(return_max_logits=1)
attention(return_lse='lse')
attention(finite_padding="yes")
attention(causal_alignment='')
attention(causal_alignment=False)
attention(causal_alignment='bottom_left')
attention(causal_alignment='top_right')
attention(causal_alignment='bottom')
attention(causal_alignment='botom_right')
attention(causal_alignment='bottom-right')
attention(causal_alignment='lower_right')
attention(score_mod=3)
attention(implementation='')
attention(implementation=[])
attention(implementation=3)
attention(implementation=[None])
attention(implementation='nothing')
attention(implementation='cuddn')
attention(implementation='CuDNN')
attention(implementation=['xla', 'cuda'])
attention(implementation='fa3')
attention(implementation='flash_attention')
attention(implementation='ck')
attention(implementation='cudnn,xla')
attention(implementation='pallas')

# in other batch dims, in jit and in explain
attention(**FIVE_DIMS, bias=array(2, 2, 6, 6))
attention(**FIVE_DIMS, mask=array(2, 2, 6, 6, dtype=bool))
jax.jit(dot_product_attention)(Q, array(2, 5, 2, 7), KV)
explain(Q, jax.ShapeDtypeStruct((2, 5, 2, 7), np.float32), KV)

# static arguments that are traced
traced("is_causal", True)
traced("deterministic_backward", True)
traced("return_lse", True)
traced("return_residual", True)
traced("return_max_logits", True)
traced("max_segments", 2)
traced("local_window_size", 2.0)
traced("logits_soft_cap", 3.0)
traced("dropout_rate", 0.0)
traced("implementation", 1)

# arrays in place of numbers
attention(scale=np.ones((2, 4), np.float32))
attention(scale=np.ones(4, np.int32))
dot_product_attention(np.float32(1), KV, KV, scale=np.ones(4))
traced("local_window_size", jnp.zeros(2, jnp.int32))
traced("local_window_size", jnp.bool_(True))
jax.jit(lambda left: attention(local_window_size=(left, None)))(np.zeros(2, int))
jax.jit(lambda left: attention(local_window_size=(left, None)))(np.float32(1))
jax.jit(lambda left: attention(local_window_size=(left, None)))(True)
attention(causal_alignment=True)
attention(causal_alignment=2.0)
attention(causal_alignment=object)
attention(causal_alignment=np.array([1.0, 2.0]))
attention(causal_alignment=np.array([1, 2, 3]))
attention(causal_alignment=np.array([True, False]))
attention(causal_alignment="bottom", is_causal=True)
attention(causal_alignment=np.array([1, 2, 3]), is_causal=True)

# names that are wrong, missing or another library's
attention(wibble=1)
attention(local_windows_size=1)
dot_product_attention(Q, KV)
dot_product_attention(Q, KV, KV, query=1)
dot_product_attention(q=Q, k=KV, v=KV)
explain(Q, KV, KV, causal=True)
attention(causal=True)
attention(use_causal_mask=True, dropout_rng=None)
attention(softmax_scale=0.5)
attention(sm_scale=0.5)
explain(Q, KV, KV, sm_scale=0.5)
dropout_mask(Q, KV, KV, sm_scale=0.5)
attention(window_size=(-1, -1))
attention(window=(3, 0))
attention(segment_ids=np.ones((2, 4), int))
attention(cu_seqlens=[0, 4])
explain(Q, KV, KV, cu_seqlens_q=[0], cu_seqlens_k=[0], max_seqlen_q=4, max_seqlen_k=4)
attention(seq_lens=[4, 4])
attention(kv_lens=[4, 4])
attention(key_padding_mask=None)
attention(precision=None)
attention(target="h100")
attention(implementation="mosaic")
attention(implementation="triton")
attention(implementation=["xla_chunked", "xla"])
assert_kernels(attention, implementation=True)
assert_kernels(attention, allow_other=True)

# programs
explain_program(3, Q, target="h100")
assert_kernels(3, Q, target="h100")
explain_program(attention, target="h1000")
assert_kernels(attention, target="cpu")
assert_kernels(lambda: (attention(), None)[1], target="h100")
assert_kernels(lambda: (attention(), None)[1], target="h100", allow_others=True)
assert_kernels(attention, target="h100", implementations="cuddn")
assert_kernels(attention, target="h100", implementations=("XLA", "aitr"))
assert_kernels(attention, target="h100", implementations=())

# layouts
attention(qkv_layout="bnth")
attention(qkv_layout="bshd_bshd_bshd")
attention(qkv_layout="sbhd")
attention(qkv_layout="BTHD")
attention(qkv_layout="BHSD")
attention(qkv_layout=("BTNH",))
attention(qkv_layout="thd_thd_thd")
attention(qkv_layout="thd")
attention(qkv_layout="t3hd")
"""
