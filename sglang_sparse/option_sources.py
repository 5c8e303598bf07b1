"""Where options come from: flags, a JSON file and Python, and which of them wins."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from sglang_sparse.gammas import drop_overridden, one_gamma
from sglang_sparse.option_values import FLAG, OptionsError, check_choice, flag, parse_json
from sglang_sparse.options import (
    BLOCK_SIZES,
    DEFAULT_DELTA,
    ESTIMATORS,
    GROUPS,
    HOST_DTYPES,
    PATHS,
    RULES,
    SELECT_BY,
    TAILS,
    THUMBNAIL_BITS,
    SparseDecodeOptions,
    known_values,
)
from sglang_sparse.own_pool_options import KV_FORMATS
from sglang_sparse.selection_options import FFD, check_ffd_bits

_DEST = "sparse_decode"

_OF_ONE_RULE = (("top_k", "top-k"), ("delta", "top-delta"), ("path", "top-delta"))
"""Options that a file gives for its rule, and that mean nothing once a flag asks for another rule."""


PRESETS: dict[str, dict[str, Any]] = {
    "moira": {"estimator": "mean-variance", "gamma": 0.99, "block_size": 16, "rule": "coverage", "tail": "drop"},
    "ffd": {"estimator": "ffd", "rule": "top-delta", "tail": "drop"},
    # 64 blocks of 64 and a window of 32: 6,144 tokens, 4.7% of 131,072.
    "sparda": {
        "estimator": "strided-mean",
        "block_size": 64,
        "rule": "top-k",
        "top_k": 96,
        "tail": "drop",
        "select_by": "forecast",
        "sink_tokens": 64,
        "window_tokens": 2048,
        "min_context": 8192,
    },
}
"""Settings after published methods, to compare with. That of SparDA reads what a forecast chooses."""


def read_config(path: str) -> dict[str, Any]:
    """The content of a `--sparse-decode-config` file, a JSON object; raises OptionsError if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    # Neither a name with a null byte nor a content that is not UTF-8 is an OSError.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionsError(f"{flag('config')} {path!r}: cannot be read ({reason})") from None
    return parse_json(text, f"{flag('config')} {path}")


def add_flags(parser: argparse.ArgumentParser, on_enable: Callable[[], None] = lambda: None) -> None:
    """Adds `--sparse-decode` and its options; only flags that were given appear in the parsed namespace.

    `on_enable` is called when `--sparse-decode` is parsed; an OptionsError of it ends the program as a usage error.
    """

    class Enable(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
            try:
                on_enable()
            except OptionsError as error:
                parser.exit(2, f"sglang-sparse: error: {error}\n")
            setattr(namespace, self.dest, True)

    group = parser.add_argument_group(
        "sparse decode", "Read only the blocks of KV that carry the attention mass in each decode step (sglang-sparse)."
    )
    default = SparseDecodeOptions()

    def add(name: str, help_text: str, **kwargs: Any) -> None:
        shown = getattr(default, name, None)
        # True and false belong to flags that take no value.
        shown = "none" if shown in (None, ()) else "off" if shown is False else shown
        group.add_argument(
            flag(name),
            dest=f"{_DEST}_{name}",
            default=argparse.SUPPRESS,
            help=help_text if "Unless given" in help_text else f"{help_text} (default: {shown})",
            **kwargs,
        )

    group.add_argument(
        FLAG,
        dest=_DEST,
        action=Enable,
        nargs=0,
        default=argparse.SUPPRESS,
        help="Decode sparsely. Sets --page-size to 64 unless given. (default: off)",
    )
    add("gamma", "Share of the attention mass that the blocks read must cover, above 0 and at most 1.", type=float)
    add("estimator", "How the mass of a block is estimated without reading its keys.", metavar=_braces(ESTIMATORS))
    add(
        "thumbnail_bits",
        "Bits a channel in the thumbnail estimator; 2 with ffd.",
        type=int,
        metavar=_braces(THUMBNAIL_BITS),
    )
    add(
        "block_size",
        "Tokens in a block, the unit of selection; divides the page size.",
        type=int,
        metavar=_braces(BLOCK_SIZES),
    )
    add(
        "group",
        "What gamma applies to: the average over the query heads that share a KV head, or every one of them.",
        metavar=_braces(GROUPS),
    )
    add(
        "tail",
        "What stands for the blocks that are not read: their page's mean value, weighted by their estimated mass, or "
        "nothing (drop). Unless given: mean with the estimators thumbnail and exact, else drop.",
        metavar=_braces(TAILS),
    )
    add("rule", "How estimates become a list of blocks.", metavar=_braces(RULES))
    add("top_k", "Blocks to keep with rule top-k: a count, or a fraction of the context below 1.", type=float)
    add(
        "delta",
        "With rule top-delta: blocks are kept that have a token whose score is within so many nats of the largest "
        f"score among sinks, latest tokens and open page. Unless given: {DEFAULT_DELTA:g}.",
        type=float,
    )
    add(
        "path",
        "With rule top-delta: select and attend in one pass (fused), by way of block lists (lists), or as measurements "
        "of the batch size say (auto). With split keys always lists.",
        metavar=_braces(PATHS),
    )
    add(
        "select_by",
        "What ranks the blocks that attention reads: the layer's own queries, or a forecast of them from the layer "
        "before (SparDA). A forecast changes the output: it is there to compare with.",
        metavar=_braces(SELECT_BY),
    )
    add("min_context", "Requests with fewer tokens read everything.", type=int)
    add("sink_tokens", "Tokens at the start that are always read.", type=int)
    add("window_tokens", "Latest tokens that are always read.", type=int)
    add(
        "gamma_by_layer",
        "One gamma for each layer, such as 0.95,0.9,0.99, instead of gamma (python -m sglang_sparse.calibrate).",
    )
    add("dense_layers", "Layers that read everything, such as 0,1 or 0-3.")
    add(
        "audit_rate",
        "Share of decode steps that measure one request's true coverage; 0 measures none.",
        type=float,
    )
    add(
        "kv_format",
        "What keys are kept as: in the model's dtype, or split into 2-bit codes, which the estimator reads, and 8-bit "
        "residuals, which takes a sixth less memory. Sets --sparse-decode-thumbnail-bits to 2.",
        metavar=_braces(KV_FORMATS),
    )
    add("offload", "Keep the KV cache in host memory, and on the GPU the blocks in use.", action="store_true")
    add(
        "host_memory",
        "Host memory for the KV cache: GiB, or a share below 1 of what the process may take. Unless given: 0.8.",
        metavar="SIZE",
    )
    add(
        "host_dtype",
        "How keys and values are kept in host memory: in the model's dtype, or in float8, which halves the memory and "
        "what comes over PCIe.",
        metavar=_braces(HOST_DTYPES),
    )
    add(
        "hot_cache",
        "GPU memory for the blocks in use: GiB, or a share below 1 of the KV budget. Unless given: what is left.",
        metavar="SIZE",
    )
    add("staging", "Tokens of cached prefixes that a prefill batch may have. Unless given: the context.", type=int)
    add(
        "forecast",
        "With offload: what names the next layer's blocks, which are then prefetched: none, query (the next layer's "
        "own query projection), or a file of heads (python -m sglang_sparse.forecast.train). Answers do not depend on "
        f"it, except with {flag('select_by')} forecast. Unless given: query, if the model allows it.",
        metavar="{none,query,FILE}",
    )
    add("forecast_budget", "MiB that may be prefetched for a layer in a step.", type=float, metavar="MIB")
    add(
        "preset",
        "Settings after a published method, to compare with: moira (mean and variance of 16-token blocks, gamma 0.99), "
        "ffd (its 2-bit keys, top-delta), sparda (a forecast chooses 96 blocks of 64, which changes the output). Other "
        "flags and the config win over it.",
        metavar=_braces(tuple(PRESETS)),
    )
    add(
        "allow_untested_sglang",
        "Run on an SGLang release that sparse decode has not been tested with.",
        action="store_true",
    )
    add(
        "config",
        "JSON file with any of these options but preset, and those without a flag: page_size, model, gamma_by_head "
        "(for each layer a list of one gamma for each KV head, instead of gamma), and slot_shares (by layer, for "
        "offload). Flags win over it.",
        metavar="FILE",
    )


def _braces(choices: tuple) -> str:
    return "{" + ",".join(map(str, choices)) + "}"


def pop_flags(namespace: argparse.Namespace) -> SparseDecodeOptions | None:
    """Removes our flags from `namespace` and returns the options, or None without `--sparse-decode`."""
    given = {key: value for key, value in vars(namespace).items() if key == _DEST or key.startswith(f"{_DEST}_")}
    for key in given:
        delattr(namespace, key)
    enabled = given.pop(_DEST, False)
    if not enabled:
        if given:
            name = next(iter(given))[len(_DEST) + 1 :]
            raise OptionsError(f"{flag(name)} has no effect without {FLAG}: add {FLAG} or remove it")
        return None
    return merge({key[len(_DEST) + 1 :]: value for key, value in given.items()})


def merge(given: Mapping[str, Any]) -> SparseDecodeOptions:
    """Options from `given` values over those of the file named by its key `config`, over the defaults."""
    values = dict(given)
    config = values.pop("config", None)
    preset = values.pop("preset", None)
    if preset is not None:
        check_choice("preset", preset, tuple(PRESETS))
    chosen = PRESETS.get(preset, {})
    values = one_gamma(known_values(values, "options"), "options")
    if config is None:
        return _over(chosen, values)
    source = f"{flag('config')} {config}"
    below = one_gamma(known_values(read_config(config), source), source)
    drop_overridden(below, values)
    return _over({**chosen, **below}, values)


def _over(below: Mapping[str, Any], values: Mapping[str, Any]) -> SparseDecodeOptions:
    """Options from `values`, and from `below` what they leave open."""
    below = dict(below)
    for name, rule in _OF_ONE_RULE:
        if values.get("rule", rule) != rule:
            below.pop(name, None)
    if values.get("estimator") == FFD:
        below.pop("thumbnail_bits", None)
    together = {**below, **values}
    if together.get("estimator") == FFD and type(together.get("thumbnail_bits")) is int:
        # Of an object's bits nobody knows whether they were given.
        check_ffd_bits(together["thumbnail_bits"])
    return SparseDecodeOptions(**together)
