"""What is refused by name on several tensor-parallel ranks, and what is warned of, as nobody has tried it."""

from __future__ import annotations

import logging
from typing import Any

from sglang_sparse import sglang_compat
from sglang_sparse.option_values import UnsupportedError, flag
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.selection_options import FORECAST

logger = logging.getLogger(__name__)

_ONE_RANK_ARGUMENTS = ("enable_lora", "lora_paths")
"""Server arguments that have not been tested on more than one rank."""


def check_ranks(given: dict[str, Any], options: SparseDecodeOptions) -> None:
    """Raises UnsupportedError if `given` server arguments ask for more ranks than go with the others and `options`."""
    ranks = int(given.get("tp_size") or 1)
    if ranks == 1:
        return
    if not sglang_compat.has_tested_ranks():
        raise UnsupportedError(
            "--sparse-decode: tensor parallelism has not been tested on this SGLang release: use "
            f"{', '.join(sglang_compat.TENSOR_PARALLEL_RELEASES)}, or --tp-size 1"
        )
    asked = [f"--{name.replace('_', '-')}" for name in _ONE_RANK_ARGUMENTS if given.get(name)]
    if options.resolved_forecast != "none":
        asked.insert(0, f"{flag('select_by')} {FORECAST}" if options.select_by == FORECAST else flag("forecast"))
    if options.own_pool:
        asked.insert(0, options.own_pool)
    if asked:
        raise UnsupportedError(f"{asked[0]} has not been tested with --tp-size {ranks}: remove it, or use --tp-size 1")


def warn_untested(ranks: int, device: str) -> None:
    """Logs a warning if several ranks are to run where none have run yet."""
    if ranks > 1 and device.startswith("cuda"):
        logger.warning(
            "Sparse decode with --tp-size %d: tensor parallelism has been tested on two CPU ranks, not on GPUs. "
            "Compare a few answers with those of a server without --sparse-decode.",
            ranks,
        )


def check_head_partition(model_config: Any, ranks: int, device: str) -> None:
    """Raises UnsupportedError unless the heads of SGLang's `ModelConfig` can be divided over `ranks`."""
    kv_heads, query_heads = model_config.get_total_num_kv_heads(), model_config.num_attention_heads
    if query_heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise UnsupportedError(
            f"--tp-size {ranks}: {query_heads} query heads and {kv_heads} KV heads cannot be divided over {ranks} "
            "ranks: use one that divides them"
        )
    # Elsewhere ranks share a head; on a CPU SGLang adds empty ones after its model is loaded.
    if device == "cpu" and kv_heads % ranks:
        raise UnsupportedError(
            f"--tp-size {ranks} exceeds the {kv_heads} KV heads of the model, which is not supported with --device "
            f"cpu: use at most {kv_heads}"
        )


def check_heads(found: int, expected: range) -> None:
    """Raises UnsupportedError unless this rank has as many KV heads as `expected` names: options by head are theirs."""
    if found != len(expected):
        raise UnsupportedError(
            f"--sparse-decode: SGLang gives this rank {found} KV heads where {len(expected)} were expected: "
            "use --tp-size 1"
        )
