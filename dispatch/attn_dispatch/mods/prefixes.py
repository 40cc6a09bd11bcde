"""The mask of prompts that completions share, as GRPO packs them: each prompt is in a row once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import settings
from attn_dispatch.call.mod_facts import ModFacts, Size
from attn_dispatch.call.values import as_int32, known_values
from attn_dispatch.mods.checks import Numbers, check_array, check_int
from attn_dispatch.semantics.row_ids import search


def shared_prefix(
    prompt_lengths: Numbers,
    completion_lengths: Numbers,
    length: SupportsIndex,
    *,
    max_prompt_len: SupportsIndex | None = None,
    max_completion_len: SupportsIndex | None = None,
) -> SharedPrefix:
    """Completions attend to their prompt and, causally, to themselves, but not to each other.

    A row holds a prompt and its completions one after the other, then the next prompt with its
    own, then padding, which attends to nothing. The mask is causal itself, and two ranges of keys
    for each query.

    Args:
      prompt_lengths: integers [B], or [B, P] with several prompts in a row; in tokens.
      completion_lengths: integers [B, G], or [B, P, G]: those of each prompt; 0 for none.
      length: static: T, the tokens of a row, which are queries and keys.
      max_prompt_len: static: no prompt is longer. With both bounds predicted times count the tiles
        that the mask leaves, and with several prompts in a row every kernel skips keys farther back
        than the longest prompt with all of its completions.
      max_completion_len: static: no completion is longer.

    Returns:
      The mask_mod, which also has three int32 arrays [B, T] for the model and the loss:
      `positions`, in which each completion continues its prompt; `completions`, the number of each
      token's completion in its row, or -1 for prompts and padding; and `previous`, the place of
      the token before, whose logits predict this one: that of a completion's first token is its
      prompt's last. The first token of a prompt, and padding, have their own place.

    Raises:
      ValueError: shapes do not match; or a length is below 0 or above its bound, or a row holds
        more than `length`. Traced lengths are not checked, except under ATTN_DISPATCH_CHECK=1: the
        prompts for which they are wrong are padding, with all of their completions.
    """
    prompts = check_array("prompt_lengths", prompt_lengths, "integer", ("B",), ("B", "P"))
    completions = check_array(
        "completion_lengths", completion_lengths, "integer", ("B", "G"), ("B", "P", "G")
    )
    if completions.shape[:-1] != prompts.shape:
        raise ValueError(
            f"completion_lengths: expected an array {[*prompts.shape, 'G']} for prompt_lengths "
            f"{list(prompts.shape)}, got {list(completions.shape)}".replace("'", "")
        )
    bounds = Bounds.of(check_int("length", length, 1), max_prompt_len, max_completion_len)
    _check(prompts, completions, bounds)
    if prompts.ndim == 1:
        prompts, completions = prompts[:, None], completions[:, None]
    lengths = jnp.concatenate([as_int32(prompts)[..., None], as_int32(completions)], axis=-1)
    return _layout(lengths, bounds)


@dataclass(frozen=True)
class Bounds:
    """Static bounds, in tokens."""

    row: int
    prompt: int
    completion: int

    @staticmethod
    def of(row: int, prompt: SupportsIndex | None, completion: SupportsIndex | None) -> Bounds:
        """The bounds of shared_prefix's arguments; that of the row where none is given."""
        given = {"max_prompt_len": prompt, "max_completion_len": completion}
        bounds = (row if x is None else check_int(name, x, 1) for name, x in given.items())
        return Bounds(row, *(min(x, row) for x in bounds))


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    positions: jax.Array
    completions: jax.Array
    previous: jax.Array
    prompt_end: jax.Array
    """int32 [B, T]: the end of the prompt that a completion's token continues."""
    first: jax.Array
    """int32 [B, T]: the first token of the prompt or completion; T for padding."""
    prompt_first: jax.Array | None
    """int32 [B, T]; None if every row has one prompt, which begins it."""
    bounds: Bounds
    max_group_len: int
    """No prompt is longer with all of its completions."""

    def __call__(self, b: jax.Array, n: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        # The static bounds change nothing: they tell how far the numbers in arrays can reach.
        longest = max(self.bounds.prompt, self.bounds.completion)
        is_own = s >= jnp.maximum(self.first[b, t], t - (longest - 1))
        end = self.prompt_end[b, t]
        if self.prompt_first is None:
            return (s <= t) & ((s < jnp.minimum(end, self.bounds.prompt)) | is_own)
        begin = jnp.maximum(self.prompt_first[b, t], t - (self.max_group_len - 1))
        return (s <= t) & (s >= begin) & ((s < end) | is_own)

    @property
    def facts(self) -> ModFacts:
        rows, length = self.first.shape
        return ModFacts((Size("prompt_lengths", "B", rows), Size("length", "T", length)))


def _layout(lengths: jax.Array, bounds: Bounds) -> SharedPrefix:
    """The mask for lengths [B, P, 1 + G]: of each prompt, and of its completions."""
    batch, prompts, parts = lengths.shape
    # So that the sums of wrong lengths are not below those of right ones.
    clipped = jnp.clip(lengths, 0, bounds.row + 1).reshape(batch, -1)
    ends = jnp.cumsum(clipped, axis=1)
    starts = ends - clipped
    limits = np.array([bounds.prompt, *[bounds.completion] * (parts - 1)])
    is_wrong = ((lengths < 0) | (lengths > limits)).any(-1)
    is_wrong |= ends.reshape(lengths.shape)[..., -1] > bounds.row

    t = jnp.broadcast_to(jnp.arange(bounds.row, dtype=jnp.int32), (batch, bounds.row))
    part = search(ends, t, "right")
    is_padding = part >= prompts * parts
    part = jnp.minimum(part, prompts * parts - 1)
    prompt = part // parts

    def at(x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, index, axis=1)

    is_padding |= at(is_wrong, prompt)
    is_completion = (part % parts > 0) & ~is_padding
    first, prompt_first, prompt_end = (
        at(starts, part),
        *(at(x, prompt * parts) for x in (starts, ends)),
    )
    begins_after = jnp.where(is_completion & (prompt_end > prompt_first), prompt_end - 1, t)
    before = jnp.where(is_completion, prompt_end - prompt_first, 0)
    return SharedPrefix(
        positions=jnp.where(is_padding, 0, before + t - first),
        completions=jnp.where(is_completion, part - prompt - 1, -1),
        previous=jnp.where(is_padding, t, jnp.where(t > first, t - 1, begins_after)),
        prompt_end=jnp.where(is_completion, prompt_end, 0),
        first=jnp.where(is_padding, bounds.row, first),
        prompt_first=None if prompts == 1 else prompt_first,
        bounds=bounds,
        max_group_len=min(bounds.row, bounds.prompt + (parts - 1) * bounds.completion),
    )


def _check(prompts: jax.Array, completions: jax.Array, bounds: Bounds) -> None:
    """Raise if lengths are wrong, as soon as they are known."""
    known = known_values(prompts), known_values(completions)
    if known[0] is not None and known[1] is not None:
        _check_known(known[0], known[1], bounds)
    elif settings.current().check:
        jax.debug.callback(partial(_check_known, bounds=bounds), prompts, completions)


def _check_known(prompts: np.ndarray, completions: np.ndarray, bounds: Bounds) -> None:
    given = {
        "prompt_lengths": (prompts, bounds.prompt),
        "completion_lengths": (completions, bounds.completion),
    }
    for name, (lengths, most) in given.items():
        lengths = np.asarray(lengths)
        wrong = lengths[(lengths < 0) | (lengths > most)]
        if wrong.size:
            raise ValueError(f"{name}: expected lengths from 0 to {most}, got {wrong[0]}")
    each = [np.asarray(x).reshape(len(x), -1) for x in (prompts, completions)]
    total = np.concatenate(each, axis=1).sum(axis=1, dtype=np.int64).max(initial=0)
    if total > bounds.row:
        raise ValueError(
            f"length: expected at least {total}, the tokens of a row, got {bounds.row}"
        )
