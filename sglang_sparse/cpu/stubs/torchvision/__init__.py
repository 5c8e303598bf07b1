"""Lets the installed torchvision import beside a torch build that its compiled part does not fit.

The torchvision wheel on the Python Package Index is linked against CUDA. Beside a CPU build of torch its library does
not load, its operators are missing, and registering their fake kernels fails the import. This module finds the
installed torchvision, declares the missing operators, and becomes that package. Nothing is declared where they exist.
"""

import importlib.machinery
import sys
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_stubs = Path(__file__).resolve().parent.parent
_others = [entry for entry in sys.path if Path(entry or ".").resolve() != _stubs]
_real = importlib.machinery.PathFinder.find_spec(__name__, _others)
if _real is None or _real.loader is None:
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
__spec__, __file__, __path__ = _real, _real.origin, _real.submodule_search_locations

from torchvision.extension import _has_ops  # noqa: E402

if not _has_ops():
    # The library object owns the declarations: without a reference they would be withdrawn.
    _declarations = torch.library.Library("torchvision", "FRAGMENT")
    for _schema in _SCHEMAS:
        _declarations.define(_schema)

_real.loader.exec_module(sys.modules[__name__])
