"""lm-eval and its RULER folder, found without importing what a run does not need."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_sparse.evaluate.files import INSTALL, EvaluationError

VERSION = "0.4.13"
"""Samples and scores come from this release; another one may generate others."""

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def go_offline() -> None:
    """Keeps the Hugging Face libraries from the network; has to come before their first import."""
    os.environ.update(dict.fromkeys(OFFLINE, "1"))
    # Warnings about texts that are longer than the model's context, among others, while samples are sized.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)


def require(name: str) -> ModuleType:
    """Imports `name`, or says which extra has it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name.partition(".")[0]
        raise EvaluationError(f"the package {missing} is not installed: {INSTALL}") from error


def ruler_folder() -> Path:
    """The folder of lm-eval's RULER tasks."""
    try:
        spec = importlib.util.find_spec("lm_eval")
    except ImportError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise EvaluationError(f"the package lm_eval is not installed: {INSTALL}")
    version = importlib.metadata.version("lm_eval")
    if version != VERSION:
        raise EvaluationError(f"lm-eval {version} is installed, but {VERSION} is needed: {INSTALL}")
    folder = Path(spec.submodule_search_locations[0]) / "tasks" / "ruler"
    if not folder.is_dir():
        raise EvaluationError(f"lm-eval has no folder {folder}: {INSTALL}")
    return folder


def scorer(name: str) -> Callable[[dict[str, Any], str], float]:
    """lm-eval's own scoring function `name` of the RULER tasks, as a function of a sample and the model's answer.

    Importing ``lm_eval.tasks`` would import datasets and pyarrow, so that the one file is loaded by its path, as
    lm-eval's own YAML loader does.
    """
    path = ruler_folder() / "common_utils.py"
    module = sys.modules.get("lm_eval.tasks.ruler.common_utils")
    if module is None:
        spec = importlib.util.spec_from_file_location("_ruler_scoring", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            raise EvaluationError(f"the package {error.name} is not installed: {INSTALL}") from error
    function = getattr(module, name, None)
    if function is None:
        raise EvaluationError(f"lm-eval has no scoring function {name}: make the samples anew with --prepare")

    def score(doc: dict[str, Any], answer: str) -> float:
        # Metrics are named after the lengths; those that the sample does not have are -1.
        return float(function(doc, [answer])[str(doc["max_length"])])

    return score


@contextmanager
def without_downloads() -> Iterator[None]:
    """While RULER's modules are imported: one of them fetches data of nltk that only the refused tasks need.

    It does so on the first process of a node only.
    """
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before
