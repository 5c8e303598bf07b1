"""lm-eval's generators of RULER samples: how many they make, from which seeds, and where they would never end.

lm-eval makes 500 samples per task and length, from random number generators whose state depends on what was made
before. Here every task and length starts from lm-eval's own seeds, and only as many samples as wanted are made.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from sglang_sparse.evaluate.lm_eval_parts import require, without_downloads

# Each task's module, its function that makes the samples of one length, and the tokenizer's parameter of that.
GENERATORS = {
    "niah_single_1": ("niah_utils", "generate_samples", "TOKENIZER"),
    "niah_multikey_2": ("niah_utils", "generate_samples", "TOKENIZER"),
    "niah_multikey_3": ("niah_utils", "generate_samples", "TOKENIZER"),
    "ruler_vt": ("vt_utils", "sys_vartrack_w_noise_random", "tokenizer"),
    "ruler_cwe": ("cwe_utils", "sys_word_pair_random", "tokenizer"),
    "ruler_fwe": ("fwe_utils", "sys_kwext", "tokenizer"),
}
TASKS = tuple(GENERATORS)
"""The tasks that are made from nothing but a tokenizer."""

MAX_SAMPLES = 500
# simple_evaluate's defaults.
RANDOM_SEED, NUMPY_SEED = 0, 1234
# cwe_utils's own generator.
WORD_SEED = 42


class TooShortError(Exception):
    """Not even the smallest sample of a task has as few tokens."""


@contextmanager
def shortened(task: str, count: int) -> Iterator[None]:
    """While it lasts, lm-eval makes `count` samples of `task` at most, always the same ones, and prints nothing."""
    module_name, function, parameter = GENERATORS[task]
    with without_downloads():
        # The other tasks' settings refer to this module too.
        require("lm_eval.tasks.ruler.prepare_niah")
        module = require(f"lm_eval.tasks.ruler.{module_name}")
    original = getattr(module, function)

    def limited(*arguments: Any, **options: Any) -> Any:
        options["num_samples"] = min(count, options.get("num_samples", MAX_SAMPLES))
        with kept_state(module):
            check_smallest(module, options)
        guard = Guard(options[parameter], options["max_seq_length"] + 50 * count)
        options[parameter] = guard
        made = original(*arguments, **options)
        if guard.left < 0:
            raise TooShortError
        return made

    setattr(module, function, limited)
    # lm-eval's loader would import the module anew, and undo this, unless it carries the time of its file.
    module.__mtime__ = Path(str(module.__file__)).stat().st_mtime_ns  # type: ignore[attr-defined]
    seed(module)
    try:
        # A line for every step of the search, and progress bars; errors are raised, not printed.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        setattr(module, function, original)


def seed(module: ModuleType) -> None:
    """The state that lm-eval's random number generators have in a process that makes this one task only."""
    random.seed(RANDOM_SEED)
    require("numpy").random.seed(NUMPY_SEED)
    if hasattr(module, "RNG"):
        module.RNG.seed(WORD_SEED)
        # It shuffled the words when it was imported.
        module.RNG.shuffle(sorted(module.WORDS))


@contextmanager
def kept_state(module: ModuleType) -> Iterator[None]:
    """Whatever is drawn while it lasts does not change what is drawn after it."""
    numpy_random = require("numpy").random
    before, numpy_before = random.getstate(), numpy_random.get_state()
    own = module.RNG.getstate() if hasattr(module, "RNG") else None
    yield
    random.setstate(before)
    numpy_random.set_state(numpy_before)
    if own is not None:
        module.RNG.setstate(own)


def check_smallest(module: ModuleType, options: dict[str, Any]) -> None:
    """Raises `TooShortError` where variable tracking would search for ever, or common words come out without a word."""
    length = options["max_seq_length"]
    name = module.__name__.rpartition(".")[2]
    if name == "vt_utils":
        example = options.get("icl_example")
        text, names = module.generate_input_output(options.get("incremental", 10), 1, 4, is_icl=example is None)
        parts, answer = [text + f" {names}"], 30
        if example is not None:
            parts.append(example["input"] + " " + " ".join(example["outputs"]) + "\n\n")
    elif name == "cwe_utils":
        shown, text, names = module.generate_input_output(10, length)
        parts, answer = [shown + "\n" + text + " ".join(names)], 120
    else:
        return
    # Random names differ by some tokens.
    if sum(len(options["tokenizer"](part).input_ids) for part in parts) + answer + 16 > length:
        raise TooShortError


class Guard:
    """A tokenizer that ends lm-eval's search for a sample that fits, should none be found.

    Two of the generators try for ever, and catch every exception. After `left` calls texts seem to have no tokens, so
    that the search comes to an end; the samples are void then.
    """

    def __init__(self, tokenizer: Callable[[str], Any], calls: int) -> None:
        self.tokenizer = tokenizer
        self.left = calls

    def __call__(self, text: str) -> Any:
        self.left -= 1
        return self.tokenizer(text) if self.left >= 0 else SimpleNamespace(input_ids=[])
