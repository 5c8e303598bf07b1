"""Sparse decode for SGLang: each decode step reads only the blocks of KV that carry the attention mass."""

from __future__ import annotations

from typing import Any

__all__ = ["OptionsError", "SparseDecodeOptions", "engine_kwargs"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazy: importing the package must not import SGLang or torch.
    if name in ("OptionsError", "SparseDecodeOptions"):
        from sglang_sparse import options

        return getattr(options, name)
    if name == "engine_kwargs":
        from sglang_sparse.plugin import engine_kwargs

        return engine_kwargs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
