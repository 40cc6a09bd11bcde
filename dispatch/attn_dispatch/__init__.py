"""One attention call for JAX: cuDNN on NVIDIA, AITER on AMD, XLA everywhere else.

`public_names` lists the names. It is imported, and JAX with it, when the first of them is used: the
`attn-dispatch` command answers `--help` without.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any  # noqa: TID251  # a public name of the package, whatever it is

from attn_dispatch._version import __version__ as __version__
from attn_dispatch.choices import missing

if TYPE_CHECKING:
    from attn_dispatch.public_names import *  # noqa: F403
else:  # a type checker would take any name for one of the package
    _ELSEWHERE = {
        "attention": "dot_product_attention",
        "flashattention": "dot_product_attention",
        "flashattnfunc": "dot_product_attention",
        "fusedattention": "dot_product_attention",
        "multiheadattention": "dot_product_attention",
        "scaleddotproductattention": "dot_product_attention",
        "flashattnvarlenfunc": "ragged_dot_product_attention",
        "raggedattention": "ragged_dot_product_attention",
    }
    """By what other libraries say, without underscores, the name here."""

    def __getattr__(name: str) -> Any:
        is_public = not name.startswith("_") or name == "__all__"
        module = f"{__name__}.{name}"
        if not name.startswith("__") and find_spec(module) is not None:
            return import_module(module)  # it must not wait for all public names
        if is_public:
            public_names = import_module(f"{__name__}.public_names")
            if name == "__all__" or name in public_names.__all__:
                value = globals()[name] = getattr(public_names, name)
                return value
        raise missing(__name__, name, __getattr__("__all__") if is_public else (), _ELSEWHERE)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
