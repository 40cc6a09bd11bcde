"""Facts about each trainer, for check.py."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Trainer:
    patch: str
    paths: tuple[str, ...]
    """The folders of the source that must be on Python's path."""
    tests: tuple[str, ...]
    swaps: Mapping[str, tuple[tuple[str, str], ...]]
    """By test file, the (old, new) texts to replace so that it tests attn_dispatch."""
    options: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    """Packages for which stand_ins.py has stand-ins if they are not installed."""


_FLASH = "axlearn/common/flash_attention"
_OURS = "AttnDispatchFlashAttention"
_IMPORT = f"from {_FLASH.replace('/', '.')}.test_utils import"
_OUR_IMPORT = (
    f"from {_FLASH.replace('/', '.')}.attn_dispatch_attention import (\n"
    f"    {_OURS},\n    AttnDispatchPagedAttention,\n)\n{_IMPORT}"
)

_SUPPORTED = "chex.assert_equal(test_fn.is_supported(input_batch, kv_cache_type=None), True)"
# No kernel takes float32, so that on a GPU AXLearn tries its next class.
_SUPPORTED_IN_16_BITS = (
    "if q.dtype == jnp.float32 and not test_fn.is_supported(input_batch, kv_cache_type=None):\n"
    f'            self.skipTest("float32")\n        {_SUPPORTED}'
)

AXLEARN = Trainer(
    patch="axlearn.patch",
    paths=(".",),
    tests=(
        f"{_FLASH}/gpu_attention_test.py",
        f"{_FLASH}/decoding_test.py",
        f"{_FLASH}/layer_test.py",
        f"{_FLASH}/utils_test.py",
        f"{_FLASH}/remat_test.py",
        f"{_FLASH}/common_test.py",
        "axlearn/common/attention_bias_test.py",
        "axlearn/common/kv_cache/kv_cache_test.py",
        "axlearn/common/kv_cache/paged_kv_cache_test.py",
        "axlearn/common/kv_cache/sliding_window_kv_cache_test.py",
    ),
    swaps={
        f"{_FLASH}/gpu_attention_test.py": (
            (_IMPORT, _OUR_IMPORT),
            ("PallasGPUFlashAttention.default", f"{_OURS}.default"),
            ("CuDNNGPUFlashAttention.default", f"{_OURS}.default"),
            ("CuDNNGPUFlashAttentionWithExplicitBias.default", f"{_OURS}.default"),
            ("[PallasGPUFlashAttention, CuDNNGPUFlashAttention]", f"[{_OURS}]"),
            (_SUPPORTED, _SUPPORTED_IN_16_BITS),
        ),
        f"{_FLASH}/decoding_test.py": (
            (_IMPORT, _OUR_IMPORT),
            ("[GPUDecoding, TPUDecoding]", f"[{_OURS}]"),
            ("[GPUPagedAttention, TPUPagedAttention]", "[AttnDispatchPagedAttention]"),
        ),
    },
    options=("-p", "stand_ins", "-p", "older_jax_names", "-p", "no:cacheprovider"),
    stand_ins=(
        "grain",
        "nltk",
        "pyarrow",
        "seqio",
        "tensorflow",
        "tensorflow_datasets",
        "tensorflow_text",
        "transformers",
        "wandb",
    ),
)

MAXTEXT = Trainer(
    patch="maxtext.patch",
    paths=("src", "."),
    tests=("tests/unit/attention_test.py", "tests/unit/attention_compressed_test.py"),
    swaps={
        "tests/unit/attention_test.py": (('"dot_product"', '"attn_dispatch"'),),
    },
    options=("-p", "no:cacheprovider"),
)

TRAINERS = {"axlearn": AXLEARN, "maxtext": MAXTEXT}
