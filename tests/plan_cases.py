"""The calls that the tests plan with real cuDNN: every option, and the combinations that matter.

Planning one takes cuDNN half a second, so every case says something that no other says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch.conformance.case import Case, spec_of
from attn_dispatch.conformance.sizes import BOTTOM_RIGHT, CAUSAL, Packed, Ragged
from attn_dispatch.conformance.sizes import case as sized
from attn_dispatch.spec import AttentionSpec

Facts = dict[str, Any]


@dataclass(frozen=True)
class PlanCase:
    """One attention call that is planned forward and backward."""

    label: str
    """What the table of support calls it."""
    case: Case
    gradients: tuple[str, ...] | None = None
    """The operands whose gradient the backward call computes; None: of all that have one."""
    needs_lse: bool = True
    needs_keep: bool = False
    has_score_mod: bool = False

    def forward_spec(self) -> AttentionSpec:
        options = self.case.forward_options(needs_lse=self.needs_lse, needs_keep=self.needs_keep)
        return spec_of(self._with_score_mod(options), self.case.operands())

    def backward_spec(self) -> AttentionSpec:
        case = self.case
        out = jax.ShapeDtypeStruct((case.b, case.t, case.n, case.v), case.dtype)
        lse = jax.ShapeDtypeStruct((case.b, case.n, case.t), jnp.float32)
        residuals = {"out": out, "out_grad": out, "lse": lse, "lse_grad": lse}
        options = self._with_score_mod(case.backward_options(self.gradients))
        return spec_of(options, case.operands() | residuals)

    def _with_score_mod(self, options):
        return replace(options, score_mod=jnp.tanh) if self.has_score_mod else options


_D64: Facts = {"t": 256, "s": 256, "h": 64, "n": 8, "k": 2}
_D128: Facts = _D64 | {"h": 128}
_CROSS: Facts = _D64 | {"t": 128, "s": 320}
_MLA: Facts = _D64 | {"h": 192, "v": 128}
_LENGTHS: Facts = {"q_lengths": (1, 0.45), "kv_lengths": (1, 0.7)}
_SEGMENTS: Facts = {"packed": Packed((((1, 0.4), (2, 0.6)), ((1, 0.9),))), "max_segments": 4}
_CU_SEQLENS: Facts = {"packed": Ragged(((0.3, 0.1, 0.5),), ((0.4, 0.2, 0.3),))}
_WINDOW: Facts = {"window": (64, None), **CAUSAL}
_SAME: Facts = {"bias_dtype": "same"}
_QKV = ("query", "key", "value")
import itertools
SECTIONS = {
"shapes": {
 "full_f16": (_D64|{"dtype":"float16"},),
 "causal_d128": (_D128|CAUSAL,),
 "causal_d256": (_D64|{"h":256}|CAUSAL,),
 "d20": (_D64|{"h":20}|CAUSAL,),
 "mla": (_MLA|CAUSAL,),
 "v128": (_D64|{"v":128}|CAUSAL,),
 "odd_br": (_D64|{"t":100,"s":333}|BOTTOM_RIGHT,),
 "more_queries_br": (_D64|{"t":320,"s":128}|BOTTOM_RIGHT,),
 "decode": (_D128|{"t":1,"s":512},),
 "half_tile": (_D64|{"t":192,"s":192},),
 "one": (_D64|{"b":1,"n":1,"k":1,"t":1,"s":128},),
 "inference": (_D128|CAUSAL, {"needs_lse":False}),
},
"windows": {
 "w_tl": (_D64|_WINDOW,),
 "w_br": (_CROSS|{"window":(64,None)}|BOTTOM_RIGHT,),
 "w_both": (_D64|{"window":(50,20)},),
 "w_both_br": (_CROSS|{"window":(50,20),"alignment":"bottom_right"},),
 "w_mq": (_D64|{"t":320,"s":128}|_WINDOW,),
},
"lengths": {
 "len": (_D64|_LENGTHS|CAUSAL,),
 "len_br": (_D64|_LENGTHS|BOTTOM_RIGHT,),
 "len_w_br": (_D64|_LENGTHS|{"window":(50,20),"alignment":"bottom_right"},),
 "len_decode": (_D128|{"t":1,"s":512,"kv_lengths":(1,0.7)},),
},
"packed": {
 "seg": (_D64|_SEGMENTS|CAUSAL,),
 "cu": (_D128|_CU_SEQLENS|CAUSAL,),
 "cu_br": (_D64|_CU_SEQLENS|BOTTOM_RIGHT,),
 "seg_w": (_D64|_SEGMENTS|_WINDOW,),
 "seg_d256": (_D64|{"h":256}|_SEGMENTS|CAUSAL,),
 "seg_mla": (_MLA|_SEGMENTS|CAUSAL,),
},
"bias": {
 **{f"b_{a}{b}{c}s_{d}": (_D64|{"bias":f"{a}{b}{c}s","bias_dtype":d},) for a in "1b" for b in "1n" for c in "1t" for d in ("float32","same")},
 "b_1nt1": (_D64|{"bias":"1nt1"},),
 "b_no": (_D64|{"bias":"1nts"},{"gradients":_QKV}),
 "b_no16": (_D64|{"bias":"b1ts","bias_dtype":"same"},{"gradients":_QKV}),
 "b_causal": (_D128|{"bias":"1nts"}|CAUSAL,),
 "b_br": (_CROSS|{"bias":"1nts"}|BOTTOM_RIGHT,),
 "b_len": (_D64|{"bias":"1nts"}|_LENGTHS|CAUSAL,),
 "b_cap": (_D64|{"bias":"1nts","soft_cap":4.0},),
 "b_sinks": (_D64|{"bias":"1nts","sinks":1},),
 "b_w": (_D64|{"bias":"1nts"}|_WINDOW,),
 "b_packed": (_D64|{"bias":"1nts"}|_SEGMENTS,),
 "b_d256": (_D64|{"h":256,"bias":"1nts"},),
},
"mask": {
 "m_b1ts": (_D64|{"mask":"b1ts"},),
 "m_b11s": (_D64|{"mask":"b11s"}|CAUSAL,),
 "m_bias": (_D64|{"mask":"b11s","bias":"1nts"}|CAUSAL,),
},
"alibi": {
 "a": (_D64|{"alibi":1}|CAUSAL,),
 "a_full": (_D64|{"alibi":1},),
 "a_br": (_CROSS|{"alibi":1}|BOTTOM_RIGHT,),
 "a_len": (_D64|{"alibi":1}|_LENGTHS|CAUSAL,),
 "a_len_br": (_D64|{"alibi":1}|_LENGTHS|BOTTOM_RIGHT,),
 "a_seg": (_D64|{"alibi":1}|_SEGMENTS|CAUSAL,),
 "a_qkv": (_D64|{"alibi":1}|CAUSAL,{"gradients":_QKV}),
},
"cap": {
 "c": (_D64|{"soft_cap":30.}|CAUSAL,),
 "c_len": (_D64|{"soft_cap":30.}|_LENGTHS|CAUSAL,),
 "c_seg": (_D64|{"soft_cap":30.}|_SEGMENTS|CAUSAL,),
 "c_d256": (_D64|{"h":256,"soft_cap":30.}|CAUSAL,),
 "c_alibi": (_D64|{"soft_cap":30.,"alibi":1}|CAUSAL,),
 "c_sinks": (_D64|{"soft_cap":30.,"sinks":1}|_WINDOW,),
 "c_w": (_D64|{"soft_cap":30.}|_WINDOW,),
},
"sinks": {
 "s": (_D64|{"sinks":1}|CAUSAL,),
 "s_w": (_D64|{"sinks":1}|_WINDOW,),
 "s_len": (_D64|{"sinks":1}|_LENGTHS|CAUSAL,),
 "s_seg": (_D64|{"sinks":1}|_SEGMENTS|CAUSAL,),
 "s_decode": (_D64|{"sinks":1,"t":1},),
},
"dropout": {
 "d": (_D64|{"dropout":.2}|CAUSAL,),
 "d_len": (_D64|{"dropout":.2}|_LENGTHS|CAUSAL,),
 "d_seg": (_D64|{"dropout":.2}|_SEGMENTS|CAUSAL,),
 "d_keep": (_D64|{"dropout":.2}|CAUSAL,{"needs_keep":True}),
 "d_br": (_CROSS|{"dropout":.2}|BOTTOM_RIGHT,),
 "d_sinks": (_D64|{"dropout":.2,"sinks":1}|CAUSAL,),
},
"max": {
 "x": (_D64|{"needs_max":True}|CAUSAL,),
 "x_sinks": (_D64|{"needs_max":True,"sinks":1}|CAUSAL,),
 "x_seg": (_D64|{"needs_max":True}|_SEGMENTS|CAUSAL,),
 "x_cap": (_D64|{"needs_max":True,"soft_cap":3.}|CAUSAL,),
},
"lse": {
 "l64": (_D64|{"lse_grad":True}|CAUSAL,),
 "l128": (_D128|{"lse_grad":True}|CAUSAL,),
 "l128_d120": (_D64|{"h":120,"lse_grad":True}|CAUSAL,),
 "l256": (_D64|{"h":256,"lse_grad":True}|CAUSAL,),
 "l_mla": (_MLA|{"lse_grad":True}|CAUSAL,),
 "l_seg": (_D64|{"lse_grad":True}|_SEGMENTS|CAUSAL,),
},
"det": {
 "t": (_D64|{"deterministic":True}|CAUSAL,),
 "t_long": (_D64|{"deterministic":True,"t":8192,"s":8192}|CAUSAL,),
 "t_seg": (_D64|{"deterministic":True}|_SEGMENTS|CAUSAL,),
 "t_len": (_D64|{"deterministic":True}|_LENGTHS|CAUSAL,),
 "t_d256": (_D64|{"deterministic":True,"h":256}|CAUSAL,),
 "t_drop": (_D64|{"deterministic":True,"dropout":.2}|CAUSAL,),
},
}
def _make(name, facts, options=None):
    return PlanCase(name, sized(name, **facts), **(options or {}))
CASES = {n: _make(n,*x) for sec in SECTIONS.values() for n,x in sec.items()}
