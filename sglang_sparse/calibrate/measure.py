"""Measures settings on prompts: how far from dense decode, what was covered, what was read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_sparse.calibrate.prompts import Prompt
from sglang_sparse.calibrate.replay import Pass, Prefix, Replay
from sglang_sparse.calibrate.settings import DENSE, Setting

Progress = Callable[[str], None]
"""Called with what was just done, once for each pass."""


def moves(bar: Any) -> Progress:
    """A progress function that moves a tqdm `bar` on by one."""

    def progress(text: str) -> None:
        bar.set_postfix_str(text)
        bar.update()

    return progress


@dataclass(frozen=True)
class Result:
    """One setting on a set of prompts. KL is of the next-token distribution, dense against sparse, in nats."""

    setting: Setting
    prompts: int
    positions: int
    """Forced tokens, over all prompts."""
    kl_mean: float
    kl_p99: float
    kl_max: float
    kl_by_prompt: dict[str, float]
    """Mean of each prompt."""
    agreement: float
    """Share of positions with dense decode's most likely token."""
    coverage_mean: float
    coverage_p1: float
    """True coverage of a query head: mean, and the value that 1% of (layer, position, head) stay below."""
    kept: float
    """Blocks read ÷ all blocks."""
    bytes_read: float
    """(Bytes scanned + KV bytes read) ÷ all KV bytes."""
    kept_by_head: list[list[float]]
    """`[layers][KV heads]`; so are the next two, which are over the head's positions and query heads."""
    coverage_by_head: list[list[float]]
    coverage_p1_by_head: list[list[float]]
    bytes_by_layer: list[float]

    def row(self) -> dict[str, Any]:
        """The figures as a flat row."""
        names = ["kl_mean", "kl_p99", "kl_max", "agreement", "coverage_mean", "coverage_p1", "kept", "bytes_read"]
        return {
            "estimator": self.setting.estimator,
            "rule": self.setting.rule,
            "value": round(self.setting.value, 5),
            **{name: getattr(self, name) for name in names},
        }


@dataclass
class Reference:
    """One prompt, prefilled, with its forced tokens and dense decode's log-probabilities."""

    prompt: Prompt
    prefix: Prefix
    tokens: list[int]
    log_probs: torch.Tensor
    """`[N, vocabulary]` fp32."""


def prepare(replay: Replay, prompt: Prompt, tokens: int, stop: frozenset[int] = frozenset()) -> Reference:
    """Prefills a prompt and runs its forced tokens densely; an answer of dense decode ends before `stop` tokens."""
    prefix = replay.prefill(prompt.tokens, tokens)
    forced = prompt.forced if prompt.forced is not None else replay.decode_densely(prefix, stop)
    dense = replay.force(prefix, forced, DENSE, measure=False)
    return Reference(prompt, prefix, forced, dense.logits.log_softmax(-1))


class Tally:
    """Sums up the passes of one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._names: list[str] = []
        self._kl: list[torch.Tensor] = []
        self._agreement: list[torch.Tensor] = []
        self._coverage: list[torch.Tensor] = []
        self._kept_blocks: torch.Tensor | float = 0.0
        self._blocks = 0
        self._scanned: torch.Tensor | float = 0.0
        self._tokens = 0

    def add(self, reference: Reference, made: Pass) -> None:
        dense, sparse = reference.log_probs, made.logits.log_softmax(-1)
        self._names.append(reference.prompt.name)
        self._kl.append((dense.exp() * (dense - sparse)).sum(-1).clamp_min(0).double().cpu())
        self._agreement.append((dense.argmax(-1) == sparse.argmax(-1)).cpu())
        self._coverage.append(made.coverage)
        self._kept_blocks = self._kept_blocks + made.kept_blocks.sum(1)
        self._blocks += int(made.blocks.sum())
        self._scanned = self._scanned + made.scanned * made.tokens
        self._tokens += made.tokens

    def result(self) -> Result:
        kl, agreement = torch.cat(self._kl), torch.cat(self._agreement)
        coverage = torch.cat(self._coverage, 1).transpose(1, 2).flatten(2)
        assert isinstance(self._kept_blocks, torch.Tensor)
        # Sums over all prompts, divided once: long prompts count for what is read of them.
        kept = self._kept_blocks / self._blocks
        read = kept.mean(1) + self._scanned / self._tokens
        return Result(
            setting=self.setting,
            prompts=len(self._kl),
            positions=len(kl),
            kl_mean=kl.mean().item(),
            kl_p99=kl.quantile(0.99).item(),
            kl_max=kl.max().item(),
            kl_by_prompt={name: part.mean().item() for name, part in zip(self._names, self._kl, strict=True)},
            agreement=agreement.double().mean().item(),
            coverage_mean=coverage.mean().item(),
            coverage_p1=_quantile(coverage.flatten(), 0.01).item(),
            kept=kept.mean().item(),
            bytes_read=read.mean().item(),
            kept_by_head=kept.tolist(),
            coverage_by_head=coverage.mean(-1).tolist(),
            coverage_p1_by_head=_quantile(coverage, 0.01).tolist(),
            bytes_by_layer=read.tolist(),
        )


def _quantile(values: torch.Tensor, q: float) -> torch.Tensor:
    """The lower quantile along the last dimension; `torch.quantile` refuses large inputs."""
    return values.sort(-1).values[..., int(q * (values.shape[-1] - 1))]


def measure_references(
    replay: Replay, references: Iterable[Reference], settings: Sequence[Setting], progress: Progress = lambda text: None
) -> list[Result]:
    """Every setting on prompts that are prepared already."""
    tallies = [Tally(setting) for setting in settings]
    for reference in references:
        prefix = reference.prefix.on(replay.device)
        for tally in tallies:
            tally.add(reference, replay.force(prefix, reference.tokens, tally.setting))
            progress(f"{reference.prompt.name}: {tally.setting.estimator} {tally.setting.value:g}")
    return [tally.result() for tally in tallies]


def measure(
    replay: Replay,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    tokens: int,
    stop: frozenset[int] = frozenset(),
    progress: Progress = lambda text: None,
) -> list[Result]:
    """Every setting on every prompt, each prompt prefilled once and then forgotten."""
    return measure_references(replay, (prepare(replay, prompt, tokens, stop) for prompt in prompts), settings, progress)
