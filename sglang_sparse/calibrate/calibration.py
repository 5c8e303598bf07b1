"""The flow of a calibration: search on most prompts, check on the others, write a config."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from sglang_sparse.calibrate import head_search, search
from sglang_sparse.calibrate import report as reports
from sglang_sparse.calibrate.errors import CalibrationError
from sglang_sparse.calibrate.measure import Reference, Result, measure_references, moves, prepare
from sglang_sparse.calibrate.prompts import Prompt
from sglang_sparse.calibrate.replay import Replay
from sglang_sparse.calibrate.settings import Setting
from sglang_sparse.files import write_bytes
from sglang_sparse.options import SparseDecodeOptions

HELD_OUT = 0.34
"""Share of the prompts that only check."""

GAMMA_PER = "layer"
"""What gets a gamma of its own, unless `--gamma-per` is given."""

FEW = 3
"""Prompts that each KV head is measured alone on."""


def split(prompts: Sequence[Prompt], share: float) -> set[int]:
    """Indices of the prompts that only check: about `share` of each kind, never all of it, and at least one prompt.

    Raises CalibrationError if there is only one prompt.
    """
    kinds: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        kinds[prompt.kind].append(index)
    held: set[int] = set()
    for indices in kinds.values():
        # The last ones of each kind; a kind of one prompt is searched on.
        held.update(indices[len(indices) - min(round(share * len(indices)), len(indices) - 1) :])
    if not held and len(prompts) > 1:
        held = {len(prompts) - 1}
    if not held:
        raise CalibrationError("one prompt cannot be both searched on and checked with: give more prompts")
    return held


def some_of_each_kind(references: Sequence[Reference], count: int) -> list[Reference]:
    """`count` of the references, or all if there are fewer: the first of each kind, then the second of each, ..."""
    seen: dict[str, int] = defaultdict(int)
    turns = []
    for reference in references:
        turns.append(seen[reference.prompt.kind])
        seen[reference.prompt.kind] += 1
    order = sorted(range(len(references)), key=turns.__getitem__)
    return [references[i] for i in order[:count]]


def has_room(replay: Replay, needed: int) -> bool:
    """Whether `needed` bytes more leave half of the device's free memory; keys and values else wait in host memory."""
    return replay.device.type != "cuda" or needed < torch.cuda.mem_get_info(replay.device)[0] / 2


def confirm(measure: search.Measure, check: search.Measure, best: Result, target: float) -> tuple[Result, Result, int]:
    """Raises the gammas until the target holds on held-out prompts too, or none can be raised.

    Returns what `measure` and `check` say of the setting that it comes to, and how often it was raised.
    """
    raises = 0
    (confirmed,) = check([best.setting])
    while confirmed.kl_mean > target and (higher := search.raised(best.setting)) is not None:
        raises += 1
        (best,) = measure([higher])
        (confirmed,) = check([higher])
    return best, confirmed, raises


def calibrate(
    args: argparse.Namespace,
    replay: Replay,
    prompts: Sequence[Prompt],
    base: Setting,
    stop: frozenset[int],
    about: dict[str, Any],
) -> int:
    """Finds the setting for `--target-kl`, checks it on held-out prompts and writes the config.

    Raises CalibrationError if no setting holds the target, or only ones that read about as much as dense decode.
    """
    target = args.target_kl
    gamma_per = args.gamma_per or GAMMA_PER
    held = split(prompts, args.held_out or HELD_OUT)
    tried: list[Result] = []
    with tqdm(unit="pass", disable=None) as bar:
        progress = moves(bar)
        references: list[Reference] = []
        for prompt in prompts:
            reference = prepare(replay, prompt, args.tokens, stop)
            if not has_room(replay, reference.prefix.bytes * (len(prompts) - len(references))):
                reference.prefix = reference.prefix.on("cpu")
            references.append(reference)
            progress(f"dense: {prompt.name}")
        fitted = [reference for i, reference in enumerate(references) if i not in held]
        checked = [references[i] for i in sorted(held)]

        def measure(settings: Sequence[Setting]) -> list[Result]:
            results = measure_references(replay, fitted, settings, progress)
            tried.extend(results)
            return results

        best = search.uniform(measure, base, target)
        if best is None:
            raise CalibrationError(f"no setting holds --target-kl {target:g} on these prompts: raise it")
        one_gamma = best
        if gamma_per != "model":
            best = search.by_layer(measure, one_gamma, target)
        found = [best]
        if gamma_per == "head":
            few = some_of_each_kind(fitted, FEW)
            by_head = head_search.by_head(
                measure, lambda settings: measure_references(replay, few, settings, progress), one_gamma, target
            )
            if by_head.bytes_read < best.bytes_read:
                found.append(by_head)

        def check(settings: Sequence[Setting]) -> list[Result]:
            return measure_references(replay, checked, settings, progress)

        # What reads less on the fitted prompts may have to be raised further.
        outcomes = [confirm(measure, check, best, target) for best in found]
        best, confirmed, raises = min(outcomes, key=lambda made: (made[1].kl_mean > target, made[0].bytes_read))
    if confirmed.kl_mean > target or best.bytes_read > search.WORTH:
        raise CalibrationError(
            f"--target-kl {target:g} does not hold below {best.bytes_read:.0%} of the bytes "
            f"(KL {confirmed.kl_mean:.3g} on the held-out prompts): raise it, or decode densely"
        )
    print(reports.table([best, confirmed]))
    print(
        f"second line: the {len(held)} of {len(prompts)} prompts that the search did not see; "
        f"they raised the gammas {raises} times"
    )
    print(predicted_gain(replay, about["mean_context"], best.bytes_read))
    config = json.dumps(search.to_config(best, replay.shape), indent=1) + "\n"
    write_bytes(args.config, config.encode())
    if args.out:
        entries = [reports.entry(best, "chosen"), reports.entry(confirmed, "held out")]
        entries += [reports.entry(result, "tried") for result in tried]
        reports.write_json(args.out, {**about, "target_kl": target}, entries)
    if args.csv:
        reports.append_csv(args.csv, about, [best])
    if args.plot:
        # Layers measured alone are steps on the way, not settings to choose from.
        shown = [reports.entry(result) for result in (*tried, best) if not result.setting.options.dense_layers]
        reports.plot(args.plot, about, shown, reports.entry(best))
    shortest, least = min(len(prompt.tokens) for prompt in prompts), SparseDecodeOptions().min_context
    if shortest < least:
        print(
            f"note: a prompt has {shortest} tokens; the server decodes requests below --sparse-decode-min-context "
            f"({least}) densely",
            file=sys.stderr,
        )
    print(f"wrote {args.config}: start the server with --sparse-decode --sparse-decode-config {args.config}")
    return 0


def predicted_gain(replay: Replay, context: int, share: float) -> str:
    """What the bytes say of the time per token: a decode step has to read weights and KV, in the served types."""
    embedding = replay.model.get_input_embeddings().weight
    tied = replay.model.get_output_embeddings().weight is embedding
    parameters = sum(p.numel() for p in replay.model.parameters()) - (0 if tied else embedding.numel())
    served = dataclasses.replace(replay.geometry, dtype=replay.served_dtype)
    weights = parameters * served.dtype.itemsize
    kv = context * replay.layers * served.kv_heads * served.kv_bytes
    gains = ", ".join(
        f"{(weights + batch * kv) / (weights + batch * kv * share):.2f} at batch {batch}" for batch in (1, 8, 64)
    )
    return f"predicted from bytes (weights and KV) at {context} tokens, dense ÷ sparse time per token: {gains}"
