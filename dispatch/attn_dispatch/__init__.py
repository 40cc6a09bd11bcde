"""One attention call for JAX: cuDNN on NVIDIA, AITER on AMD, XLA everywhere else."""

from attn_dispatch._version import __version__ as __version__
from attn_dispatch.api import dot_product_attention as dot_product_attention
from attn_dispatch.api import explain as explain
from attn_dispatch.cudnn import register as register_cudnn_calls
from attn_dispatch.explain import Explanation as Explanation
from attn_dispatch.select import AttentionFallbackWarning as AttentionFallbackWarning
from attn_dispatch.settings import fallback as fallback
from attn_dispatch.target import target as target
