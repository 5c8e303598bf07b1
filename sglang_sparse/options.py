"""The options of sparse decode: one typed object. `option_sources` makes it from flags and files.

Every option has one name. Flags spell it `--sparse-decode-<name>` with dashes, JSON files and Python use the
field's name (`thumbnail_bits`; JSON also takes dashes). The object is immutable once validated.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_sparse import gammas
from sglang_sparse.option_values import (
    FLAG,
    check_choice,
    check_int,
    check_number,
    layer_numbers,
    parse_json,
)
from sglang_sparse.option_values import OptionsError as OptionsError
from sglang_sparse.option_values import flag as flag
from sglang_sparse.own_pool_options import FLOAT8_HOST as FLOAT8_HOST
from sglang_sparse.own_pool_options import HOST_DTYPES as HOST_DTYPES
from sglang_sparse.own_pool_options import check_kv_format, check_offload
from sglang_sparse.selection_options import FFD, FORECAST, STRIDED_MEAN, THUMBNAILS, check_selection
from sglang_sparse.selection_options import SELECT_BY as SELECT_BY

ENVIRONMENT_VARIABLE = "SGLANG_SPARSE_DECODE_OPTIONS"
"""Carries the options, as JSON, from the process that parsed them to SGLang's scheduler processes."""

ESTIMATORS = ("thumbnail", FFD, "mean", "mean-variance", "minmax", "exact", STRIDED_MEAN)
RULES = ("coverage", "top-k", "top-delta", "all")
GROUPS = ("average", "every")
TAILS = ("mean", "drop")
PATHS = ("auto", "lists", "fused")
DEFAULT_DELTA = 6.0
SCORE_ESTIMATORS = ("thumbnail", FFD, "exact")
"""Estimators that guess single tokens' scores, which rule top-delta compares."""
MASS_ESTIMATORS = ("thumbnail", "exact")
"""Estimators whose masses are close enough to the true ones to weigh values with; minmax and mean give bounds, and
FFD's codes are too coarse."""
THUMBNAIL_BITS = (2, 3, 4)
BLOCK_SIZES = (8, 16, 32, 64)
PAGE_SIZES = (16, 32, 64, 128)
DEFAULT_PAGE_SIZE = 64
DEFAULT_MAX_REQUESTS = 64
"""With a KV pool of our own: requests at once unless `--max-running-requests` says otherwise; each has an open page of
all layers."""
DEFAULT_FORECAST_BUDGET = 8.0
"""MiB a layer and step: what PCIe brings at 48 GB/s in 175 microseconds, about a layer of an 8B model."""
CONFIG_ONLY = ("page_size", "model", "gamma_by_head", "slot_shares")
"""Options that only a config file or Python can give."""


@dataclass(frozen=True)
class ModelShape:
    """What a config file made for one model is checked against."""

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def from_value(cls, value: Any) -> ModelShape:
        """From a JSON object; raises OptionsError if it is none or a field is missing, unknown or of another type."""
        types = {"architecture": str, "layers": int, "kv_heads": int, "head_dim": int}
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or {k: type(v) for k, v in value.items()} != types:
            raise OptionsError(f"config key 'model' is {value!r}: give an object with {', '.join(types)}")
        return cls(**value)

    def __str__(self) -> str:
        return f"{self.architecture} of {self.layers} layers, {self.kv_heads} KV heads, head dim {self.head_dim}"


@dataclass(frozen=True)
class SparseDecodeOptions:
    """What to read in each decode step. Raises OptionsError on construction if a value is wrong.

    Defaults are the same for flags, JSON files and Python.
    """

    gamma: float = 0.975
    estimator: str = "thumbnail"
    thumbnail_bits: int = 4
    block_size: int = 16
    group: str = "average"
    tail: str | None = None
    """See `resolved_tail`."""
    rule: str = "coverage"
    top_k: float | None = None
    delta: float | None = None
    """See `resolved_delta`."""
    path: str = "auto"
    """Whether rule top-delta goes through block lists or through the fused pass; see `paths`."""
    min_context: int = 4096
    sink_tokens: int = 16
    window_tokens: int = 128
    dense_layers: tuple[int, ...] = ()
    audit_rate: float = 0.001
    gamma_by_layer: tuple[float, ...] = ()
    """One gamma for each layer, instead of `gamma`."""
    page_size: int | None = None
    """SGLang's page size unless `--page-size` is given; a key of config files, without a flag of its own."""
    model: ModelShape | None = None
    """The model that a config file was made for, if it says so; without a flag."""
    gamma_by_head: gammas.GammaByHead = ()
    """One gamma for each layer and KV head, instead of `gamma`; without a flag."""
    allow_untested_sglang: bool = False
    """Whether to run on an SGLang release that sparse decode has not been tested with."""
    kv_format: str = "model"
    """What keys are kept as: in the model's dtype, or split into codes and residuals (docs/kv_format.md)."""
    offload: bool = False
    """Whether the KV cache is in host memory (docs/offload.md)."""
    host_memory: str | None = None
    """Host memory for it: GiB, or a share below 1 of what the process may take. None: 0.8."""
    host_dtype: str = "model"
    """What keys and values are in host memory: of the model's dtype, or float8 with a power of two for each token."""
    hot_cache: str | None = None
    """GPU memory for the blocks in use: GiB, or a share below 1 of the KV budget. None: what summaries leave."""
    staging: int | None = None
    """Tokens of prefixes that a prefill batch may have. None: the model's context."""
    forecast: str | None = None
    """What guesses the next layer's queries: `none`, `query`, or a file of trained heads. See `resolved_forecast`."""
    forecast_budget: float = DEFAULT_FORECAST_BUDGET
    """MiB that a layer's forecast may fetch in a step."""
    select_by: str = "query"
    """What ranks the blocks that attention reads: the layer's own queries, or the forecast of the layer before, which
    changes the output (SparDA)."""
    slot_shares: tuple[float, ...] = ()
    """Shares of the blocks in use by layer; without a flag. Empty: equal ones."""

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma)
        if not 0 < self.gamma <= 1:
            raise OptionsError(f"{flag('gamma')} is {self.gamma}: give a share of attention mass above 0 and at most 1")
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_choice("thumbnail_bits", self.thumbnail_bits, THUMBNAIL_BITS)
        check_choice("block_size", self.block_size, BLOCK_SIZES)
        check_choice("group", self.group, GROUPS)
        check_choice("rule", self.rule, RULES)
        if self.tail is not None:
            check_choice("tail", self.tail, TAILS)
        if self.tail == "mean" and self.estimator not in MASS_ESTIMATORS:
            raise OptionsError(
                f"{flag('tail')} mean needs better mass estimates than those of {flag('estimator')} {self.estimator}: "
                f"use {flag('tail')} drop, or {flag('estimator')} {' or '.join(MASS_ESTIMATORS)}"
            )
        self._check_top_k()
        self._check_delta()
        self._check_path()
        check_int("min_context", self.min_context, 0)
        check_int("sink_tokens", self.sink_tokens, 0)
        check_int("window_tokens", self.window_tokens, 1)
        object.__setattr__(self, "dense_layers", layer_numbers(self.dense_layers))
        object.__setattr__(self, "gamma_by_layer", gammas.by_layer(self.gamma_by_layer))
        object.__setattr__(self, "gamma_by_head", gammas.by_head(self.gamma_by_head))
        if self.gamma_by_layer and self.gamma_by_head:
            raise OptionsError("options: give gamma_by_layer or gamma_by_head, not both")
        if (self.gamma_by_layer or self.gamma_by_head) and self.rule != "coverage":
            raise OptionsError(f"{self.gamma_name} has no effect with {flag('rule')} {self.rule}: remove it")
        if self.page_size is not None and (type(self.page_size) is not int or self.page_size not in PAGE_SIZES):
            raise OptionsError(
                f"config key 'page_size' is {self.page_size!r}: choose one of {', '.join(map(str, PAGE_SIZES))}"
            )
        if self.model is not None:
            object.__setattr__(self, "model", ModelShape.from_value(self.model))
        if type(self.allow_untested_sglang) is not bool:
            raise OptionsError(f"{flag('allow_untested_sglang')} is {self.allow_untested_sglang!r}: give true or false")
        check_number("audit_rate", self.audit_rate)
        if not 0 <= self.audit_rate <= 1:
            raise OptionsError(f"{flag('audit_rate')} is {self.audit_rate}: give a share of decode steps from 0 to 1")
        check_selection(self)
        check_offload(self)
        check_kv_format(self)

    def check_kv_cache_dtype(self, kv_cache_dtype: str | None) -> None:
        """Raises OptionsError if SGLang's `--kv-cache-dtype` asks for quantised keys where they are split."""
        if self.kv_format == "split" and kv_cache_dtype not in (None, "auto", "bf16", "bfloat16"):
            raise OptionsError(
                f"{flag('kv_format')} split does not go with --kv-cache-dtype {kv_cache_dtype}: it quantises keys "
                f"itself and keeps values in the model's dtype; use --kv-cache-dtype auto, or {flag('kv_format')} model"
            )

    @property
    def own_pool(self) -> str | None:
        """What users call the option that asks for a KV pool of our own; None where SGLang's serves."""
        if self.offload:
            return flag("offload")
        return f"{flag('kv_format')} split" if self.kv_format == "split" else None

    @property
    def resolved_forecast(self) -> str:
        """What guesses the next layer's queries; unless given, `query` where there is something to prefetch or to
        select."""
        return self.forecast or ("query" if self.offload or self.select_by == FORECAST else "none")

    @property
    def resolved_tail(self) -> str:
        """What stands for the blocks that are not read, `mean` or `drop`; `mean` where the estimator allows it, unless
        given."""
        if self.tail is not None:
            return self.tail
        return "mean" if self.estimator in MASS_ESTIMATORS and self.select_by != FORECAST else "drop"

    @property
    def resolved_delta(self) -> float:
        """Nats below the pseudo-maximum within which rule top-delta keeps a block."""
        return DEFAULT_DELTA if self.delta is None else self.delta

    @property
    def gamma_name(self) -> str:
        """What users call the option that says which coverage is asked for."""
        if self.gamma_by_head:
            return "config key 'gamma_by_head'"
        return flag("gamma_by_layer" if self.gamma_by_layer else "gamma")

    @property
    def lowest_gamma(self) -> float:
        """The lowest coverage asked for in any layer and KV head."""
        return min(
            (gamma for layer in self.gamma_by_head for gamma in layer),
            default=min(self.gamma_by_layer or (self.gamma,)),
        )

    def gamma_of(self, layer: int) -> float:
        """The coverage asked for in a layer; the mean over its KV heads if they differ."""
        if self.gamma_by_head:
            return sum(self.gamma_by_head[layer]) / len(self.gamma_by_head[layer])
        return self.gamma_by_layer[layer] if self.gamma_by_layer else self.gamma

    def head_gammas(self, layer: int, kv_heads: int, first: int = 0) -> tuple[float, ...]:
        """The coverage asked for in each of `kv_heads` KV heads of a layer, from the model's KV head `first` on."""
        if self.gamma_by_head:
            return self.gamma_by_head[layer][first : first + kv_heads]
        return (self.gamma_of(layer),) * kv_heads

    def _check_top_k(self) -> None:
        if self.top_k is None:
            if self.rule == "top-k":
                raise OptionsError(
                    f"{flag('rule')} top-k needs {flag('top_k')}: a count of blocks, or a fraction below 1"
                )
            return
        if self.rule != "top-k":
            raise OptionsError(
                f"{flag('top_k')} has no effect with {flag('rule')} {self.rule}: add {flag('rule')} top-k or remove it"
            )
        check_number("top_k", self.top_k)
        if self.top_k <= 0 or (self.top_k > 1 and self.top_k != int(self.top_k)):
            raise OptionsError(
                f"{flag('top_k')} is {self.top_k}: give a whole number of blocks, or a fraction above 0 and below 1"
            )

    def _check_delta(self) -> None:
        if self.rule == "top-delta" and self.estimator not in SCORE_ESTIMATORS:
            raise OptionsError(
                f"{flag('rule')} top-delta compares scores of tokens, which {flag('estimator')} {self.estimator} does "
                f"not give: use {flag('estimator')} {' or '.join(SCORE_ESTIMATORS)}"
            )
        if self.delta is None:
            return
        if self.rule != "top-delta":
            raise OptionsError(
                f"{flag('delta')} has no effect with {flag('rule')} {self.rule}: "
                f"add {flag('rule')} top-delta or remove it"
            )
        check_number("delta", self.delta)
        if self.delta <= 0:
            raise OptionsError(f"{flag('delta')} is {self.delta}: give a number of nats above 0")

    def _check_path(self) -> None:
        check_choice("path", self.path, PATHS)
        if self.path != "fused":
            return
        for name, value, needed in (("rule", self.rule, ("top-delta",)), ("estimator", self.estimator, THUMBNAILS)):
            if value not in needed:
                raise OptionsError(
                    f"{flag('path')} fused does not go with {flag(name)} {value}: "
                    f"use {flag(name)} {' or '.join(needed)}, or {flag('path')} lists"
                )

    def check_page_size(self, page_size: int) -> None:
        """Raises OptionsError unless SGLang's `page_size` (tokens) is supported and the block size divides it."""
        if page_size not in PAGE_SIZES:
            raise OptionsError(
                f"--page-size {page_size} is not supported by {FLAG}: use one of {', '.join(map(str, PAGE_SIZES))}"
            )
        if page_size % self.block_size:
            raise OptionsError(
                f"{flag('block_size')} {self.block_size} does not divide --page-size {page_size}: "
                f"use a block size of at most {page_size}"
            )

    def check_layers(self, num_layers: int, kv_heads: int) -> None:
        """Raises OptionsError if what is given by layer or by KV head does not fit a model of `num_layers` layers."""
        missing = [layer for layer in self.dense_layers if layer >= num_layers]
        if missing:
            raise OptionsError(
                f"{flag('dense_layers')} names layer {missing[0]}, but the model has layers 0 to {num_layers - 1}"
            )
        gammas.check_shapes(self.gamma_by_layer, self.gamma_by_head, num_layers, kv_heads)
        if self.slot_shares and len(self.slot_shares) != num_layers:
            raise OptionsError(
                f"config key 'slot_shares' has {len(self.slot_shares)} shares, but the model has {num_layers} layers"
            )

    def check_forecast_file(self) -> None:
        """Raises OptionsError if the file of heads that the options name is not there."""
        if self.resolved_forecast in ("none", "query"):
            return
        try:
            there = Path(self.resolved_forecast).is_file()
        except OSError:
            there = False
        if not there:
            raise OptionsError(
                f"{flag('forecast')} {self.resolved_forecast}: there is no such file: give none, query, or a file of "
                "trained heads"
            )

    def check_shape(self, shape: ModelShape) -> None:
        """Raises OptionsError if the options were made for a model of another shape."""
        if self.model is not None and self.model != shape:
            raise OptionsError(
                f"{flag('config')} was made for {self.model}, but the model is {shape}: "
                "calibrate for this model, or remove the key 'model'"
            )

    def to_json(self) -> str:
        """JSON with every option; `from_mapping` reads it back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "options") -> SparseDecodeOptions:
        """Options from a mapping of names (dashes or underscores) to values; unknown names raise OptionsError."""
        return cls(**known_values(values, source))

    @classmethod
    def from_environment(cls) -> SparseDecodeOptions | None:
        """Options that a parent process carried over, or None if sparse decode is off."""
        text = os.environ.get(ENVIRONMENT_VARIABLE)
        return cls.from_mapping(parse_json(text, ENVIRONMENT_VARIABLE), ENVIRONMENT_VARIABLE) if text else None

    def to_environment(self) -> None:
        """Makes the options visible to processes started from this one."""
        os.environ[ENVIRONMENT_VARIABLE] = self.to_json()


def known_values(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`values` under the options' own names; unknown and repeated names raise OptionsError."""
    known = {field.name for field in dataclasses.fields(SparseDecodeOptions)}
    given: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise OptionsError(f"{source}: unknown key {key!r}; known keys: {', '.join(sorted(known))}")
        if name in given:
            raise OptionsError(f"{source}: key {name!r} is given twice")
        given[name] = value
    return given
