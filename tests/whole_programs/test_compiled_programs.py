"""The lists of `explain_program` equal the optimized HLO of programs compiled for H100s.

The H100s are not there: XLA compiles for a description of them. tests/gpu/test_whole_programs.py
compiles the same programs for the GPUs that it finds.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.backend import needs_cudnn
from tests.support.model_programs import PROGRAMS
from tests.support.module_report import report_with_cuda_plugin
from tests.support.optimized_hlo import Kernel, compiled


@pytest.fixture(scope="module")
def report() -> Any:
    return report_with_cuda_plugin("tests.whole_programs.compiled_programs")


@needs_cudnn
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_list_equals_the_optimized_hlo(report: Any, name: str):
    for package in PROGRAMS[name].packages:
        pytest.importorskip(package)
    row = report[name]
    assert row["listed"] == row["compiled"] and row["others"] == []
    times = [
        sum(times for kernel, times in row["compiled"] if f"_{direction}'" in kernel)
        for direction in ("forward", "backward")
    ]
    assert times == row["expected"]


def call(name: str, batch: int) -> str:
    array = f"bf16[{batch},64,4,8]{{3,2,1,0}}"
    return (
        f"  %c = ({array}, u8[256]{{0}}) custom-call(%p, %q, %k, %v), "
        f'custom_call_target="attn_dispatch_cudnn_{name}", '
        f"operand_layout_constraints={{s32[9]{{0}}, {array}, {array}, {array}}}, "
        'backend_config={dtype = "bfloat16", head_dim = 8 : i64, num_heads = 4 : i64, '
        "num_kv_heads = 4 : i64, scale = 5.000000e-01 : f32, window_right = 0 : i64}"
    )


def loop(body: str, rounds: int) -> str:
    config = f'{{"known_trip_count":{{"n":"{rounds}"}}}}'
    return f"  %w = f32[] while(%x), condition=%is_less, body=%{body}, backend_config={config}"


MODULE = f"""
HloModule jit_step

%inner (x: f32[]) -> f32[] {{
{call("forward", 2)}
}}

%wrapped (x: f32[]) -> f32[] {{
{call("backward", 2)}
}}

%outer (x: f32[]) -> f32[] {{
{loop("inner", 5)}
  %s = f32[] async-start(%x), calls=%wrapped
  %d = f32[] async-done(%s), calls=%wrapped
  %y = f32[] custom-call(%x), custom_call_target="attn_dispatch_clear_rows"
}}

ENTRY %main (x: f32[]) -> f32[] {{
{call("forward", 7)}
{loop("outer", 3)}
  ROOT %c = f32[] call(%w), to_apply=%inner
}}
"""


def kernel(name: str, batch: int, *, is_causal: bool = True) -> Kernel:
    elements = batch * 64 * 4 * 8
    target = f"attn_dispatch_cudnn_{name}"
    return Kernel(target, "bfloat16", elements, 4, 4, 8, 0.5, is_causal, 256)


def test_the_kernels_of_a_module_are_counted():
    runs = {kernel("forward", 2): 16, kernel("backward", 2): 3, kernel("forward", 7): 1}
    assert compiled(MODULE) == runs
    without_mask = MODULE.replace("window_right = 0", "window_right = -1")
    assert kernel("forward", 7, is_causal=False) in compiled(without_mask)
    with pytest.raises(AssertionError, match="no known rounds"):
        compiled(MODULE.replace(', backend_config={"known_trip_count":{"n":"3"}}', ""))
