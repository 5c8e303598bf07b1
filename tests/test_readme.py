"""README names every option with its default."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_sparse.options import CONFIG_ONLY, SparseDecodeOptions, flag

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_flags_table_is_complete_and_true() -> None:
    rows = dict(re.findall(r"^\| `(--sparse-decode\S*)` \| (\S+) \|", README, re.MULTILINE))
    expected = {
        flag(name): "off" if default is False else {None: "unset", (): "none"}.get(default, str(default))
        for name, default in vars(SparseDecodeOptions()).items()
        if name not in CONFIG_ONLY
    }
    assert rows == {"--sparse-decode": "off", **expected}
