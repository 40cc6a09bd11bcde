"""Commands of `attn-dispatch`"""

from __future__ import annotations

from typing import Any

from attn_dispatch_tools import cli
from attn_dispatch_tools.written_calls.flags import window

CALL = "q=bf16[2,256,8,64] k=bf16[2,512,2,64]"
NUMBER = 3


def explain(*words: str) -> None:
    cli.main(["explain", *words])


def program(name: str, *words: str) -> None:
    """explain-program of a name in this module."""
    cli.main(["explain-program", f"{__name__}:{name}", *words])


def attend(x: Any) -> Any:
    from attn_dispatch import dot_product_attention

    return dot_product_attention(x, x, x)


ROWS = """
# calls as text
explain("")
explain("bf16[2,4,1,8]")
explain("k=bf16[2,4,1,8]")
explain("q=bf17[2,4,1,8]")
explain("q=f64[2,4,1,8]")
explain("q=f2[2,4,1,8]")
explain("q=f4[2,4,1,8]")
explain("q=f8[2,4,1,8]")
explain("q=d[2,4,1,8]")
explain("q=float[2,4,1,8]")
explain("q=i4[2,4,1,8]")
explain("q=i8[2,4,1,8]")
explain("q=u8[2,4,1,8]")
explain("q=int[2,4,1,8]")
explain("q=b1[2,4,1,8]")
explain("q=bf16[2,4,1,8")
explain("q=bf16[2,4,1,8] q=bf16[2,4,1,8]")
explain("q=bf16[2,4,1,8] query=bf16[2,4,1,8]")
explain("q=bf16[2,4,1,8] k=key")
explain("q=bf16[2,4,1,8] k=x")
explain("q=bf16[256]")
explain("q=f32[8,1,4] window=127,0")
explain("q=bf16[2,256,8,64] k=bf16[2,512,3,64]")
explain(CALL + " is_causal=true", "--causal")

# options of explain
explain(CALL, "--target", "h1000")
explain(CALL, "--target", "quantum")
explain(CALL, "--implementation", "cudn")
explain(CALL, "--segments", "0")
explain(CALL, "--soft-cap", "0")
explain("q=bf16[2,256,8,64] k=bf16[2]", "--segments", "2")
explain("q=bf16[2,256,8,64] k=3", "--segments", "2")
window("")
window("none")
window("1,2,3")
window("x")
window("1.5")

# explain-program
program("NUMBER")
program("nothing")
program("attend")
program("attend", "f32[1,8,2,4]", "f32[1,8,2,4]", "f32[1,8,2,4]")
program("attend", "f32[1,8,2,")
program("attend", "f32[1,8,2,4]", "--allow-others")
program("attend", "f32[1,8,2,4]", "--implementation", "cudnn")
program("attend", "f32[1,8,2,4]", "--target", "h100", "--check", "--implementation", "cuddn")
program("attend", "f32[1,8,2,4]", "--target", "h1")
program("attend", "f32[1,8,2,4]", "--target", "cpu", "--check")
program("attend", "f32[1,8,2,4]", "--mesh", "data")
program("attend", "f32[1,8,2,4]", "--mesh", "data=1")
cli.main(["explain-program", "nowhere"])
"""
