"""A public call as a line of a report, its arrays, and its programs in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.api import dot_product_attention
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.inspection import spec_of
from attn_dispatch.paged import paged_attention
from attn_dispatch.ragged import ragged_dot_product_attention
from attn_dispatch_tools.bench.regret.named_mods import functions_of
from attn_dispatch_tools.written_calls.json_file import arguments_of

FORWARD, STEP = "forward", "step"
"""The directions: the forward pass alone, and with the backward pass."""

_GRADIENTS = ("query", "key", "value", "bias", "sinks")


_LIKE_KEYS = (("value", "key"), ("value_pages", "key_pages"))
"""Arrays that a line leaves out where they have the dtype and shape of the keys."""


@dataclass(frozen=True)
class TimedCall:
    """A public call with everything that its arrays' values depend on."""

    kind: str
    call: dict[str, Any]
    """The arguments as `attn-dispatch plan` reads them: an array is its dtype and shape."""
    lengths: tuple[int, ...] = ()
    """The values of lengths or, for packed rows, the length of each sequence."""
    mods: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """See `functions_of`. A "mask" here fills the array argument of that name."""
    is_training: bool = True
    """Whether the backward pass is measured too."""

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> TimedCall:
        """The call of a line of a report, also of one by benchmarks/choices.py."""
        lengths, mods = tuple(row.get("lengths", ())), row.get("mods", {})
        is_training = bool(row.get("step") or row.get("forward_backward"))
        call = dict(row["call"])
        for value, key in _LIKE_KEYS:
            if key in call:
                call.setdefault(value, call[key])
        return TimedCall(row.get("kind", ""), call, lengths, mods, is_training)

    def to_json(self) -> dict[str, Any]:
        like_keys = {
            value for value, key in _LIKE_KEYS if self.call.get(value) == self.call.get(key)
        }
        call = {name: x for name, x in self.call.items() if name not in like_keys}
        row: dict[str, Any] = {"kind": self.kind, "call": call}
        if self.lengths:
            row["lengths"] = list(self.lengths)
        return row | ({"mods": self.mods} if self.mods else {})

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the public call, with a struct for each array."""
        mods = {name: x for name, x in self.mods.items() if name != "mask"}
        return {**arguments_of(self.call), **functions_of(mods)}

    def passes(self, direction: str) -> tuple[AttentionSpec, ...]:
        """The specs of the passes of a direction: forward, or forward and backward."""
        spec = spec_of(**self.arguments)
        if direction == FORWARD:
            return (spec,)
        return spec.in_training(tuple(x for x in _GRADIENTS if spec.has(x)))

    def arrays(self) -> dict[str, jax.Array]:
        """The arrays by name. Those that the call says are the same are one array."""
        made: dict[int, jax.Array] = {}
        found: dict[str, jax.Array] = {}
        for i, (name, x) in enumerate(self.arguments.items()):
            if isinstance(x, jax.ShapeDtypeStruct):
                if id(x) not in made:
                    made[id(x)] = jnp.asarray(self._values(name, x, jax.random.key(i)), x.dtype)
                found[name] = made[id(x)]
        return found

    def out_grad(self, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """A gradient of the output, normally distributed."""
        query, value = arrays["query"], arrays.get("value", arrays.get("value_pages"))
        assert value is not None
        shape = (*query.shape[:-1], value.shape[-1])
        return jax.random.normal(jax.random.key(99), shape, query.dtype)

    def program(
        self, arrays: Mapping[str, jax.Array], implementation: str | None, direction: str
    ) -> Callable[..., Any]:
        """A function of out_grad and the distinct arrays: the call in a direction.

        The step returns the output and the gradients.
        """
        options = {x: y for x, y in self.arguments.items() if x not in arrays}
        function: Callable[..., Any] = dot_product_attention
        if "cu_seqlens_q" in arrays:
            function = ragged_dot_product_attention
        if "page_table" in arrays:
            function = paged_attention
        distinct = distinct_arrays(arrays)
        places = {
            name: next(i for i, y in enumerate(distinct) if y is x) for name, x in arrays.items()
        }
        wanted = [name for name in _GRADIENTS if name in arrays]

        def call(arrays: Sequence[jax.Array], moved: Sequence[jax.Array]) -> jax.Array:
            named = {name: arrays[place] for name, place in places.items()}
            named |= dict(zip(wanted, moved, strict=True))
            return function(**named, **options, implementation=implementation)

        def forward(out_grad: jax.Array, *arrays: jax.Array) -> jax.Array:
            return call(arrays, [arrays[places[x]] for x in wanted])

        def step(out_grad: jax.Array, *arrays: jax.Array) -> tuple[Any, ...]:
            out, pull = jax.vjp(partial(call, arrays), [arrays[places[x]] for x in wanted])
            return out, *pull(out_grad)

        return forward if direction == FORWARD else step

    def _values(self, name: str, x: jax.ShapeDtypeStruct, key: jax.Array) -> Any:
        lengths = self.lengths
        if name.endswith("_segment_ids"):
            return np.broadcast_to(np.repeat(np.arange(len(lengths)) + 1, lengths), x.shape)
        if name.startswith("cu_seqlens"):
            return np.cumsum((0, *lengths))
        if name.endswith("_seq_lengths"):
            return np.asarray(lengths)
        if name == "alibi_slopes":
            return 2.0 ** -np.linspace(1, 8, x.shape[-1])
        if name == "page_table":
            pages = np.random.default_rng(0).permutation(x.shape[0] * x.shape[1])
            return pages.reshape(x.shape)
        if name == "mask":
            mod = functions_of({"mask_mod": self.mods["mask"]})["mask_mod"]
            t, s = (jnp.arange(n, dtype=jnp.int32) for n in x.shape[-2:])
            of_pair = lambda t, s: mod(jnp.int32(0), jnp.int32(0), t, s)  # noqa: E731
            pairs = jax.jit(jax.vmap(jax.vmap(of_pair, (None, 0)), (0, None)))(t, s)
            return jnp.broadcast_to(pairs, x.shape)
        return jax.random.normal(key, x.shape, x.dtype)


def distinct_arrays(arrays: Mapping[str, jax.Array]) -> list[jax.Array]:
    """The arrays, each once."""
    return [*{id(x): x for x in arrays.values()}.values()]
