"""`ragged_dot_product_attention` and `paged_attention`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from attn_dispatch import paged_attention, ragged_dot_product_attention
from tests.sentences.call import array

CU_Q, CU_KV = [0, 3, 3, 9, 12], [0, 4, 6, 11, 14]
Q = array(3, 1, 4, 16)
TOKENS = array(4, 4, 16)
TABLE = np.zeros((3, 5), np.int32)
PAGES = array(17, 8, 2, 16)


def ragged(**change: Any) -> Any:
    call = {
        "query": array(12, 4, 8), "key": array(14, 2, 8), "value": array(14, 2, 6),
        "cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV, "max_seqlen_q": 6, "max_seqlen_kv": 5,
    }  # fmt: skip
    return ragged_dot_product_attention(**call | change)


def paged(**change: Any) -> Any:
    call = {
        "query": Q, "key_pages": PAGES, "value_pages": PAGES, "page_table": TABLE,
        "key_value_seq_lengths": np.array([33, 7, 40], np.int32),
    }  # fmt: skip
    return paged_attention(**call | change)


ROWS = """
# packed sequences
ragged(query=array(1, 12, 4, 8))
ragged(value=array(14, 6))
ragged(cu_seqlens_q=None)
ragged(cu_seqlens_q=array(5))
ragged(cu_seqlens_q=[0])
ragged(cu_seqlens_kv=[0, 3])
ragged(cu_seqlens_q=[1, 3, 3, 9, 12])
ragged(cu_seqlens_kv=[0, 5, 3, 11, 14])
ragged(cu_seqlens_q=[0, 3, 3, 9, 13])
ragged(max_seqlen_q=5)
ragged(max_seqlen_kv=3)
ragged(max_seqlen_q=0)
ragged(max_seqlen_kv=2.0)
ragged(max_seqlen_kv=True)
ragged(return_max_logits=1)
ragged(cu_seqlens_k=[0])
ragged(sm_scale=0.5)
ragged(attn_mask=None)

# keys in pages
paged(query=array(3, 4, 16))
paged(query=array(3, 1, 3, 16))
paged(key_pages=array(9, 8, 2, 8))
paged(value_pages=array(9, 8, 2, 8))
paged(page_table=array(3, 5))
paged(page_table=np.zeros((2, 5), np.int32))
paged(page_table=np.zeros(15, np.int32))
paged(page_table=np.full((3, 5), 17, np.int32))
paged(key_value_seq_lengths=None)
paged(key_value_seq_lengths=np.array([41, 0, 0]))
paged(key_value_seq_lengths=np.zeros(3))
paged(key_value_seq_lengths=np.array([33, 7, 40]), max_seqlen_kv=13)
paged(max_seqlen_kv=41)
paged(max_seqlen_kv=0)
paged(max_seqlen_q=4)
paged(cu_seqlens_q=np.array([0, 1, 2, 3]))
paged(query=TOKENS, cu_seqlens_q=np.array([0, 4]))
paged(query=TOKENS, cu_seqlens_q=np.array([0, 1, 2, 5]))
paged(query=TOKENS, cu_seqlens_q=np.array([0, 1, 2, 3]), query_seq_lengths=np.array([1, 1, 1]))
jax.grad(lambda q: paged(query=q).sum())(Q)
jax.grad(lambda k: paged(key_pages=k).sum())(PAGES)
paged(sm_scale=0.5)
paged(window_size=(-1, -1))
paged(context_lens=[4, 4, 4])
paged(seq_lens=[4, 4, 4])
paged(dropout_p=0.1)
paged(mask_mod=None)

# keys and values in one pool, and layouts of pages
paged(key_pages=PAGES, value_pages=None)
paged(key_pages=array(17, 3, 2, 8, 16), value_pages=None, kv_layout="HND")
paged(key_pages=array(17, 2, 8, 3, 16), value_pages=None)
paged(kv_layout="nhd")
paged(kv_layout="NDH")
"""
