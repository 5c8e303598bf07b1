"""``compare``: are the scores of one run significantly below those of another over the same samples?"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from sglang_sparse.evaluate import needle, ruler
from sglang_sparse.evaluate.files import EvaluationError, read_json
from sglang_sparse.evaluate.paired import exact, holm, p_worse

LEVEL = 0.05
Key = tuple[str, int]


def run(arguments: argparse.Namespace) -> int:
    """0, or 1 if any row is significantly worse."""
    dense, sparse = (read(path) for path in (arguments.dense, arguments.sparse))
    check_same(dense, sparse, arguments)
    text, worse = table(differences(dense), differences(sparse))
    print(text)
    for path, content, expected in ((arguments.dense, dense, "dense"), (arguments.sparse, sparse, "sparse")):
        found = decoding(content)
        if found not in (None, expected):
            print(f"note: {path} was run on a server that decodes {found}ly", file=sys.stderr)
    return 1 if worse else 0


def read(path: Path) -> dict[str, Any]:
    content = read_json("compare", path, (ruler.KIND, needle.KIND), ("samples",))
    try:
        valid = content["samples"] and all(
            isinstance(sample["task"], str)
            and isinstance(sample["length"], int)
            and isinstance(sample["id"], str)
            and math.isfinite(sample["score"])
            for sample in content["samples"]
        )
    except (KeyError, TypeError):
        valid = False
    if not valid:
        raise EvaluationError(f"compare: {path} is damaged: run it anew")
    return content


def decoding(content: dict[str, Any]) -> str | None:
    """How the server of a result file decoded: `dense`, `sparse`, or None if the file does not say."""
    server = content.get("server")
    if not isinstance(server, dict) or "sparse_decode" not in server:
        return None
    return "sparse" if server["sparse_decode"] else "dense"


def check_same(dense: dict[str, Any], sparse: dict[str, Any], arguments: argparse.Namespace) -> None:
    names = f"{arguments.dense} and {arguments.sparse}"
    if dense["kind"] != sparse["kind"]:
        raise EvaluationError(f"compare: {names} are of different commands ({dense['kind']} and {sparse['kind']})")
    ids = [sorted((s["task"], s["length"], s["id"]) for s in content["samples"]) for content in (dense, sparse)]
    if ids[0] != ids[1]:
        common = len(set(ids[0]) & set(ids[1]))
        raise EvaluationError(
            f"compare: {names} differ in their samples ({len(ids[0])} and {len(ids[1])}, {common} in common): run both "
            f"with the same options, or the same --samples-from file"
        )
    if len(set(ids[0])) != len(ids[0]):
        raise EvaluationError(f"compare: {arguments.dense} holds a sample twice: run it anew")


def differences(content: dict[str, Any]) -> dict[Key, dict[str, Fraction]]:
    """Scores by task and length, then by sample."""
    scores: dict[Key, dict[str, Fraction]] = defaultdict(dict)
    for sample in content["samples"]:
        scores[sample["task"], sample["length"]][sample["id"]] = exact(sample["score"])
    return dict(scores)


def table(dense: dict[Key, dict[str, Fraction]], sparse: dict[Key, dict[str, Fraction]]) -> tuple[str, bool]:
    """The rows as Markdown, and whether any is significantly worse."""
    pairs = [(key, [(before, sparse[key][name]) for name, before in group.items()]) for key, group in dense.items()]
    everything = [pair for _, group in pairs for pair in group]
    p_values = [p_worse([after - before for before, after in group]) for _, group in pairs]
    overall = p_worse([after - before for before, after in everything])

    lines = [
        "| task | length | samples | dense | sparse | better | worse | p | p, Holm | significantly worse |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    worse = False
    for ((task, length), group), p, adjusted in zip(pairs, p_values, holm(p_values), strict=True):
        worse |= adjusted <= LEVEL
        lines.append(row(task, str(length), group, f"{p:.3g}", f"{adjusted:.3g}", adjusted))
    worse |= overall <= LEVEL
    lines.append(row("all", "all", everything, f"{overall:.3g}", "", overall))
    lines += [
        "",
        f"p: one-sided exact paired test of lower sparse scores (McNemar's where scores are 0 or 1, sign flips "
        f"otherwise), at {LEVEL:.0%}; rows corrected with Holm's method, the last row on its own.",
    ]
    return "\n".join(lines), worse


def row(task: str, length: str, group: list[tuple[Fraction, Fraction]], p: str, corrected: str, deciding: float) -> str:
    means = [float(sum(pair[side] for pair in group) / len(group)) for side in (0, 1)]
    better = sum(after > before for before, after in group)
    lower = sum(after < before for before, after in group)
    cells = [task, length, str(len(group)), f"{means[0]:.4f}", f"{means[1]:.4f}", str(better), str(lower), p, corrected]
    return "| " + " | ".join([*cells, "YES" if deciding <= LEVEL else "no"]) + " |"
