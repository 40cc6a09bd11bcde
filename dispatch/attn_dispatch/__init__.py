"""One attention call for JAX: cuDNN on NVIDIA, AITER on AMD, XLA everywhere else.

JAX is imported with the first name that is used: the command answers `--help` without it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attn_dispatch._version import __version__

if TYPE_CHECKING:
    from attn_dispatch.face import (
        AttentionConventionWarning,
        AttentionFallbackWarning,
        AttentionShardingWarning,
        Explanation,
        dot_product_attention,
        dropout_mask,
        explain,
        fallback,
        integrations,
        mods,
        paged_attention,
        ragged_dot_product_attention,
        register_aiter_calls,
        register_cudnn_calls,
        register_flash_calls,
        rewrites,
        scratch_limit,
        serving,
        sharded_dropout,
        target,
        tuning,
    )

__all__ = [
    "AttentionConventionWarning",
    "AttentionFallbackWarning",
    "AttentionShardingWarning",
    "Explanation",
    "__version__",
    "dot_product_attention",
    "dropout_mask",
    "explain",
    "fallback",
    "integrations",
    "mods",
    "paged_attention",
    "ragged_dot_product_attention",
    "register_aiter_calls",
    "register_cudnn_calls",
    "register_flash_calls",
    "rewrites",
    "scratch_limit",
    "serving",
    "sharded_dropout",
    "target",
    "tuning",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{name}"
    if find_spec(module) is not None:  # a room: importing one must not wait for the whole face
        return import_module(module)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.face"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
