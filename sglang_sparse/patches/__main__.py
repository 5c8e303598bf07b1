"""Patches a tree of SGLang so that it has `--sparse-decode` without loading a plugin.

apply and revert change all files or none, and do nothing when there is nothing to do; check says whether the tree is
patched, or else whether the patches fit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_sparse.patches.diff import PatchError
from sglang_sparse.patches.tree import Tree

MARKS = {"pristine": "is not patched; the patches fit", "patched": "is patched"}


def run(action: str, folder: Path, release: str | None) -> str:
    """Does `action` and returns what to tell the user; raises PatchError."""
    tree = Tree(folder, release)
    name = f"SGLang {tree.release} in {tree.package}"
    if action == "check":
        return f"{name} {MARKS[tree.state()]}"
    if tree.change("patched" if action == "apply" else "pristine"):
        return f"{name}: {len(tree.texts)} files {'patched' if action == 'apply' else 'as they were'}"
    return f"{name} {'is patched already' if action == 'apply' else 'is not patched'}: nothing to do"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_sparse.patches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("apply", "check", "revert"))
    parser.add_argument(
        "--tree", type=Path, required=True, metavar="DIR", help="checkout of SGLang, unpacked wheel, or site-packages"
    )
    parser.add_argument("--release", help="the release of the tree, where it does not say it itself, such as 0.5.17")
    arguments = parser.parse_args()
    try:
        print(run(arguments.action, arguments.tree, arguments.release))
    except (PatchError, OSError) as error:
        print(f"sglang-sparse: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
