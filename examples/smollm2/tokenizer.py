"""The model's tokenizer, built from the vocabulary that its GGUF file carries."""

import dataclasses

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from .model import InputError

# The system message that the model was tuned with; its chat template adds it to every chat.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Byte-level BPE as a GGUF file stores it; a token's id is its place in `tokens`."""

    pre_tokenizer: str
    tokens: tuple[str, ...]
    merges: tuple[str, ...]  # "left right", in order of priority
    special_ids: tuple[int, ...]
    end_id: int


def build_tokenizer(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """A tokenizer for `vocabulary`; it recognises special tokens, and adds none itself.

    The vocabulary lacks the tokens of 21 bytes that hardly occur in text (control characters,
    planes above 3); such bytes are dropped when encoding, as they are in the original.
    """
    if vocabulary.pre_tokenizer != "smollm":
        raise InputError(
            f"The GGUF file asks for pre-tokenizer {vocabulary.pre_tokenizer!r}, but this example "
            "knows 'smollm' only; use a SmolLM2 GGUF file."
        )
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in vocabulary.merges)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges))
    # 'smollm': every digit stands alone; the rest is split by the regular expression of GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(vocabulary.tokens[i], special=True, normalized=False)
            for i in vocabulary.special_ids
        ]
    )
    return tokenizer


def chat_prompt(question: str) -> str:
    """The text that makes the model answer `question`, by its chat template."""
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
