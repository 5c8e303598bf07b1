"""The options of sparse decode: one typed object, from flags, a JSON file, Python or the environment.

Every option has one name. Flags spell it `--sparse-decode-<name>` with dashes, JSON files and Python use the
field's name (`thumbnail_bits`; JSON also takes dashes). The object is immutable once validated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ENVIRONMENT_VARIABLE = "SGLANG_SPARSE_DECODE_OPTIONS"
"""Carries the options, as JSON, from the process that parsed them to SGLang's scheduler processes."""

ESTIMATORS = ("thumbnail", "mean", "mean-variance", "minmax", "exact")
RULES = ("coverage", "top-k", "all")
GROUPS = ("average", "every")
TAILS = ("mean", "drop")
MASS_ESTIMATORS = ("thumbnail", "exact")
"""Estimators whose masses are close enough to the true ones to weigh values with; minmax and mean give bounds."""
THUMBNAIL_BITS = (2, 3, 4)
BLOCK_SIZES = (8, 16, 32, 64)
PAGE_SIZES = (16, 32, 64, 128)
DEFAULT_PAGE_SIZE = 64
CONFIG_ONLY = ("page_size", "model")
"""Options that only a config file or Python can give."""

_LARGEST = 2**31 - 1
"""Token counts beyond this overflow the kernels' int32."""

_FLAG = "--sparse-decode"
_DEST = "sparse_decode"


class OptionsError(ValueError):
    """An option is wrong. The message is one line that names the flag or field and says what to do."""


def flag(name: str) -> str:
    """The command-line flag of the option `name`."""
    return f"{_FLAG}-{name.replace('_', '-')}"


def _choice(name: str, value: Any, allowed: tuple) -> None:
    # 4.0 equals 4, but is no size of anything.
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise OptionsError(f"{flag(name)} is {value!r}: choose one of {', '.join(map(str, allowed))}")


def _int(name: str, value: Any, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= _LARGEST:
        raise OptionsError(f"{flag(name)} is {value!r}: give a whole number from {minimum} to {_LARGEST}")


def _number(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not -_LARGEST <= value <= _LARGEST:
        raise OptionsError(f"{flag(name)} is {value!r}: give a number")


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

    def __post_init__(self) -> None:
        _number("gamma", self.gamma)
        if not 0 < self.gamma <= 1:
            raise OptionsError(f"{flag('gamma')} is {self.gamma}: give a share of attention mass above 0 and at most 1")
        _choice("estimator", self.estimator, ESTIMATORS)
        _choice("thumbnail_bits", self.thumbnail_bits, THUMBNAIL_BITS)
        _choice("block_size", self.block_size, BLOCK_SIZES)
        _choice("group", self.group, GROUPS)
        _choice("rule", self.rule, RULES)
        if self.tail is not None:
            _choice("tail", self.tail, TAILS)
        if self.tail == "mean" and self.estimator not in MASS_ESTIMATORS:
            raise OptionsError(
                f"{flag('tail')} mean needs better mass estimates than those of {flag('estimator')} {self.estimator}: "
                f"use {flag('tail')} drop, or {flag('estimator')} {' or '.join(MASS_ESTIMATORS)}"
            )
        self._check_top_k()
        _int("min_context", self.min_context, 0)
        _int("sink_tokens", self.sink_tokens, 0)
        _int("window_tokens", self.window_tokens, 1)
        object.__setattr__(self, "dense_layers", _layers(self.dense_layers))
        object.__setattr__(self, "gamma_by_layer", _gammas(self.gamma_by_layer))
        if self.gamma_by_layer and self.rule != "coverage":
            raise OptionsError(f"{flag('gamma_by_layer')} has no effect with {flag('rule')} {self.rule}: remove it")
        if self.page_size is not None and (type(self.page_size) is not int or self.page_size not in PAGE_SIZES):
            raise OptionsError(
                f"config key 'page_size' is {self.page_size!r}: choose one of {', '.join(map(str, PAGE_SIZES))}"
            )
        if self.model is not None:
            object.__setattr__(self, "model", ModelShape.from_value(self.model))
        _number("audit_rate", self.audit_rate)
        if not 0 <= self.audit_rate <= 1:
            raise OptionsError(f"{flag('audit_rate')} is {self.audit_rate}: give a share of decode steps from 0 to 1")

    @property
    def resolved_tail(self) -> str:
        """What stands for the blocks that are not read, `mean` or `drop`; `mean` where the estimator allows it, unless
        given."""
        if self.tail is not None:
            return self.tail
        return "mean" if self.estimator in MASS_ESTIMATORS else "drop"

    def gamma_of(self, layer: int) -> float:
        """The coverage asked for in a layer."""
        return self.gamma_by_layer[layer] if self.gamma_by_layer else self.gamma

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
        _number("top_k", self.top_k)
        if self.top_k <= 0 or (self.top_k > 1 and self.top_k != int(self.top_k)):
            raise OptionsError(
                f"{flag('top_k')} is {self.top_k}: give a whole number of blocks, or a fraction above 0 and below 1"
            )

    def check_page_size(self, page_size: int) -> None:
        """Raises OptionsError unless SGLang's `page_size` (tokens) is supported and the block size divides it."""
        if page_size not in PAGE_SIZES:
            raise OptionsError(
                f"--page-size {page_size} is not supported by {_FLAG}: use one of {', '.join(map(str, PAGE_SIZES))}"
            )
        if page_size % self.block_size:
            raise OptionsError(
                f"{flag('block_size')} {self.block_size} does not divide --page-size {page_size}: "
                f"use a block size of at most {page_size}"
            )

    def check_layers(self, num_layers: int) -> None:
        """Raises OptionsError if what is given by layer does not fit a model of `num_layers` layers."""
        missing = [layer for layer in self.dense_layers if layer >= num_layers]
        if missing:
            raise OptionsError(
                f"{flag('dense_layers')} names layer {missing[0]}, but the model has layers 0 to {num_layers - 1}"
            )
        if self.gamma_by_layer and len(self.gamma_by_layer) != num_layers:
            raise OptionsError(
                f"{flag('gamma_by_layer')} has {len(self.gamma_by_layer)} values, but the model has {num_layers} layers"
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
        return cls(**_known(values, source))

    @classmethod
    def from_environment(cls) -> SparseDecodeOptions | None:
        """Options that a parent process carried over, or None if sparse decode is off."""
        text = os.environ.get(ENVIRONMENT_VARIABLE)
        return cls.from_mapping(_parse_json(text, ENVIRONMENT_VARIABLE), ENVIRONMENT_VARIABLE) if text else None

    def to_environment(self) -> None:
        """Makes the options visible to processes started from this one."""
        os.environ[ENVIRONMENT_VARIABLE] = self.to_json()


def _known(values: Mapping[str, Any], source: str) -> dict[str, Any]:
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


def _layers(value: Any) -> tuple[int, ...]:
    """Layer indices from a sequence of ints or a text such as `0,1,30-31`."""
    problem = OptionsError(f"{flag('dense_layers')} is {value!r}: give layer numbers such as 0,1 or 0-3")
    if isinstance(value, str):
        parts: list[int] = []
        for item in filter(None, (part.strip() for part in value.split(","))):
            first, dash, last = item.partition("-")
            numbers = (first, last) if dash else (first, first)
            if not all(number.isdecimal() and len(number) < 6 for number in numbers) or int(numbers[1]) < int(first):
                raise problem
            parts.extend(range(int(first), int(last or first) + 1))
        value = parts
    if not isinstance(value, (list, tuple)) or any(
        not isinstance(v, int) or isinstance(v, bool) or v < 0 for v in value
    ):
        raise problem
    return tuple(sorted(set(value)))


def _gammas(value: Any) -> tuple[float, ...]:
    """Gammas from a sequence of numbers or a text such as `0.95,0.9`."""
    problem = OptionsError(
        f"{flag('gamma_by_layer')} is {value!r}: give one share above 0 and at most 1 for each layer, such as 0.95,0.9"
    )
    if isinstance(value, str):
        try:
            value = [float(part) for part in value.split(",")] if value else []
        except ValueError:
            raise problem from None
    if not isinstance(value, (list, tuple)) or any(
        not isinstance(v, (int, float)) or isinstance(v, bool) or not 0 < v <= 1 for v in value
    ):
        raise problem
    return tuple(float(v) for v in value)


def _parse_json(text: str, source: str) -> dict:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, _ in pairs:
            if sum(key == other for other, _ in pairs) > 1:
                raise OptionsError(f"{source}: key {key!r} is given twice")
        return dict(pairs)

    try:
        values = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise OptionsError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise OptionsError(f'{source}: give a JSON object such as {{"gamma": 0.95}}')
    return values


def read_config(path: str) -> dict[str, Any]:
    """The content of a `--sparse-decode-config` file, a JSON object; raises OptionsError if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return _parse_json(file.read(), f"{flag('config')} {path}")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionsError(f"{flag('config')} {path}: cannot be read ({reason})") from None


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
        shown = "none" if shown in (None, ()) else shown
        group.add_argument(
            flag(name),
            dest=f"{_DEST}_{name}",
            default=argparse.SUPPRESS,
            help=f"{help_text} (default: {shown})",
            **kwargs,
        )

    group.add_argument(
        _FLAG,
        dest=_DEST,
        action=Enable,
        nargs=0,
        default=argparse.SUPPRESS,
        help="Decode sparsely. Sets --page-size to 64 unless given. (default: off)",
    )
    add("gamma", "Share of the attention mass that the blocks read must cover, above 0 and at most 1.", type=float)
    add("estimator", "How the mass of a block is estimated without reading its keys.", metavar=_braces(ESTIMATORS))
    add("thumbnail_bits", "Bits a channel in the thumbnail estimator.", type=int, metavar=_braces(THUMBNAIL_BITS))
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
    add("config", "JSON file with any of these options; flags win over it.", metavar="FILE")


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
            raise OptionsError(f"{flag(name)} has no effect without {_FLAG}: add {_FLAG} or remove it")
        return None
    return merge({key[len(_DEST) + 1 :]: value for key, value in given.items()})


def merge(given: Mapping[str, Any]) -> SparseDecodeOptions:
    """Options from `given` values over those of the file named by its key `config`, over the defaults."""
    values = dict(given)
    config = values.pop("config", None)
    values = _one_gamma(_known(values, "options"), "options")
    if config is None:
        return SparseDecodeOptions(**values)
    source = f"{flag('config')} {config}"
    below = _one_gamma(_known(read_config(config), source), source)
    # The two say the same thing in different ways: the one that wins removes the other.
    for name, other in (("gamma", "gamma_by_layer"), ("gamma_by_layer", "gamma")):
        if name in values:
            below.pop(other, None)
    if values.get("rule", "coverage") != "coverage":
        below.pop("gamma_by_layer", None)
    return SparseDecodeOptions(**{**below, **values})


def _one_gamma(values: dict[str, Any], source: str) -> dict[str, Any]:
    if "gamma" in values and "gamma_by_layer" in values:
        raise OptionsError(f"{source}: give gamma or gamma_by_layer, not both")
    return values
