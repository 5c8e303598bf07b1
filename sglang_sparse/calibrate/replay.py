"""Teacher-forced decode of one prompt under any setting, without a server.

A Hugging Face model runs with its attention replaced: prefill is dense and leaves keys and values in paged pools laid
out as SGLang's; the forced tokens then run in one pass, each as a decode step of its own (a row of the batch) that
chooses blocks with the server's estimator and rule and attends with the server's kernel. Since layer by layer all
tokens write their keys before any attends, the pass equals decoding them one after another.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sparse_kernels import AttentionTail, AttentionWorkspace, sparse_attention

from sglang_sparse.calibrate.candidates import ScreenedEstimator, block_log_mass, token_scores
from sglang_sparse.calibrate.model import load_model
from sglang_sparse.calibrate.settings import DENSE, Setting
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import ModelShape
from sglang_sparse.selection import Maxima, PseudoMaximum, make_rule
from sglang_sparse.selection.coverage import chosen_blocks, head_coverage
from sglang_sparse.tail import MeanTail

FIRST_SLOT = 128
"""The sequence begins here: a page boundary for every page size, and page 0 is padding, as in SGLang."""

Recorder = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called with a layer that selects and what it chose: lists `[N, Hkv, blocks]` and counts `[N, Hkv]`. The next layer
overwrites both."""


@dataclass
class Pass:
    """What one pass over N forced tokens gave."""

    logits: torch.Tensor
    """`[N, vocabulary]` fp32, after each forced token, on the model's device; the rest is on the CPU."""
    coverage: torch.Tensor
    """`[layers, N, Hkv, G]`: share of each query head's true mass in the blocks read."""
    kept_blocks: torch.Tensor
    """`[layers, N, Hkv]`: blocks read."""
    blocks: torch.Tensor
    """`[N]`: all blocks of a row."""
    scanned: torch.Tensor
    """`[layers]`: bytes read to choose ÷ `tokens`' bytes of KV, over all rows."""
    tokens: int
    """Tokens of all rows: what dense decode would have read."""

    @property
    def kept(self) -> torch.Tensor:
        """`[layers, N, Hkv]`: blocks read ÷ all blocks."""
        return self.kept_blocks / self.blocks[:, None]

    @property
    def bytes_read(self) -> torch.Tensor:
        """`[layers]`: (bytes scanned + KV bytes read) ÷ all KV bytes."""
        return self.kept_blocks.sum(1).mean(1) / self.blocks.sum() + self.scanned


class Prefix:
    """A prompt's keys and values after a dense prefill, with room for the tokens to be forced."""

    def __init__(self, replay: Replay, tokens: int, room: int) -> None:
        g = replay.geometry
        slots = FIRST_SLOT + -(-(tokens + room) // 128) * 128
        pool = (replay.layers, slots, g.kv_heads, g.head_dim)
        self.length = tokens
        self.room = room
        self.k = torch.zeros(pool, dtype=g.dtype, device=replay.device)
        self.v = torch.zeros_like(self.k)
        self.next_token = -1
        """Greedy continuation of the prompt."""

    @property
    def bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def on(self, device: torch.device | str) -> Prefix:
        """This prefix if it is on `device`, or else a copy there."""
        if self.k.device.type == torch.device(device).type:
            return self
        moved = copy.copy(self)
        moved.k, moved.v = self.k.to(device), self.v.to(device)
        return moved


class Replay:
    """A model on `device`.

    Raises CalibrationError if the model cannot be loaded or is of a kind that sparse decode does not serve.
    """

    def __init__(self, folder: Path, *, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
        self.model = load_model(folder, self._attention, device=device, dtype=dtype)
        config = self.model.config
        self.device = torch.device(device)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.geometry = Geometry(
            kv_heads=config.num_key_value_heads,
            group_size=config.num_attention_heads // config.num_key_value_heads,
            head_dim=head_dim,
            dtype=self.model.dtype,
            page_size=128,
            block_size=16,
        )
        self.served_dtype = torch.float16 if config.dtype == torch.float16 else torch.bfloat16
        """Of the KV cache that a server would have; bytes are counted in it."""
        self.layers: int = config.num_hidden_layers
        self.shape = ModelShape(config.architectures[0], self.layers, self.geometry.kv_heads, head_dim)
        self._workspace = AttentionWorkspace.create(
            num_programs=None, group_size=self.geometry.group_size, head_dim=head_dim, device=device
        )
        self._prefix: Prefix | None = None
        self._start = 0
        self._step: _ForcedStep | None = None

    @torch.inference_mode()
    def prefill(self, tokens: list[int], room: int) -> Prefix:
        """Runs a prompt densely and keeps its keys and values, with room for `room` more tokens."""
        prefix = Prefix(self, len(tokens), room)
        logits = self._run(prefix, 0, tokens, None, logits_to_keep=1)
        prefix.next_token = int(logits[-1].argmax())
        return prefix

    @torch.inference_mode()
    def decode_densely(self, prefix: Prefix, stop: frozenset[int] = frozenset()) -> list[int]:
        """Greedy tokens after the prompt, as many as there is room for, or before the first in `stop`; the first token
        is returned in any case."""
        tokens = [prefix.next_token]
        while len(tokens) < prefix.room and tokens[0] not in stop:
            at = prefix.length + len(tokens) - 1
            logits = self._run(prefix, at, tokens[-1:], _ForcedStep(self, DENSE, prefix, at, 1, measure=False))
            token = int(logits[-1].argmax())
            if token in stop:
                break
            tokens.append(token)
        return tokens

    @torch.inference_mode()
    def force(
        self,
        prefix: Prefix,
        tokens: list[int],
        setting: Setting,
        measure: bool = True,
        record: Recorder | None = None,
    ) -> Pass:
        """Decodes `tokens` after the prompt under a setting. Without `measure`, coverage is left out (all NaN)."""
        setting.options.check_layers(self.layers, self.geometry.kv_heads)
        step = _ForcedStep(self, setting, prefix, prefix.length, len(tokens), measure, record)
        return step.result(self._run(prefix, prefix.length, tokens, step))

    def _run(
        self, prefix: Prefix, start: int, tokens: list[int], step: _ForcedStep | None, **arguments: Any
    ) -> torch.Tensor:
        """Logits `[T, vocabulary]` of tokens at positions from `start` on."""
        if start + len(tokens) > prefix.length + prefix.room:
            raise ValueError(f"{len(tokens)} tokens exceed the prefix's room for {prefix.room}")
        self._prefix, self._start, self._step = prefix, start, step
        ids = torch.tensor([tokens], device=self.device)
        positions = torch.arange(start, start + len(tokens), device=self.device)[None]
        try:
            return self.model(input_ids=ids, position_ids=positions, use_cache=False, **arguments).logits[0].float()
        finally:
            self._prefix = self._step = None

    def _attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention interface: `query [1, Hq, T, D]`, `key`, `value [1, Hkv, T, D]`; `[1, T, Hq, D]`."""
        layer: Any = module.layer_idx
        assert self._prefix is not None
        k_pool, v_pool = self._prefix.k[layer], self._prefix.v[layer]
        tokens = query.shape[2]
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        slots = slice(FIRST_SLOT + self._start, FIRST_SLOT + self._start + tokens)
        k_pool[slots] = key[0].transpose(0, 1)
        v_pool[slots] = value[0].transpose(0, 1)
        if self._step is not None:
            q = query[0].transpose(0, 1).contiguous()
            return self._step.attend(layer, q, k_pool, v_pool, scale)[None], None
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(self.geometry.group_size, 1),
            value.repeat_interleave(self.geometry.group_size, 1),
            is_causal=True,
            scale=scale,
        )
        return out.transpose(1, 2).contiguous(), None


class _ForcedStep:
    """N decode steps of one request, side by side as the rows of a batch, under one setting."""

    def __init__(
        self,
        replay: Replay,
        setting: Setting,
        prefix: Prefix,
        start: int,
        tokens: int,
        measure: bool,
        record: Recorder | None = None,
    ) -> None:
        self._setting = setting
        self._record = record
        self._geometry = g = setting.geometry(replay.geometry)
        self._workspace = replay._workspace
        self._measure = measure
        self._rule = make_rule(setting.options, g)
        self._estimator = setting.make_estimator(g)
        # Bytes are those of the served cache, whatever type is computed in.
        self._served = dataclasses.replace(g, dtype=replay.served_dtype)
        self._charged = setting.make_estimator(self._served)
        self._dense = set(setting.options.dense_layers) if self._rule.needs_mass else set(range(replay.layers))
        device = replay.device
        last = start + tokens
        self._seq_lens = torch.arange(start + 1, last + 1, dtype=torch.int32, device=device)
        pages = -(-last // g.page_size)
        first_page = FIRST_SLOT // g.page_size
        table = torch.arange(first_page, first_page + pages, dtype=torch.int32, device=device)
        self._page_table = table.expand(tokens, -1).contiguous()
        self._closed_pages = table[: last // g.page_size]
        self._pool_pages = prefix.k.shape[1] // g.page_size
        self._blocks = pages * g.blocks_per_page
        shape = (tokens, g.kv_heads, self._blocks)
        self._log_mass = torch.empty((tokens, g.kv_heads, g.group_size, self._blocks), device=device)
        self._scratch = torch.empty(shape, device=device)
        self._lists = torch.empty(shape, dtype=torch.int32, device=device)
        self._counts = torch.empty(shape[:2], dtype=torch.int32, device=device)
        self._maxima = Maxima.create(tokens, g, self._blocks, device) if self._rule.needs_maxima else None
        self._pseudo_maximum = PseudoMaximum(setting.options, g)
        self._kept_mask = torch.empty(shape, dtype=torch.uint8, device=device)
        self._tail = MeanTail(g) if setting.uses_served_tail else None
        self._kept_total = torch.zeros(g.kv_heads, dtype=torch.int64, device=device)
        self._row_blocks = -(-self._seq_lens // g.block_size)
        self._coverage = torch.full((replay.layers, tokens, g.kv_heads, g.group_size), float("nan"), device=device)
        self._kept_blocks = self._row_blocks[:, None].expand(replay.layers, -1, g.kv_heads).double().clone()
        self._scanned = torch.zeros(replay.layers, dtype=torch.float64)

    def result(self, logits: torch.Tensor) -> Pass:
        return Pass(
            logits=logits,
            coverage=self._coverage.cpu(),
            kept_blocks=self._kept_blocks.cpu(),
            blocks=self._row_blocks.cpu(),
            scanned=self._scanned,
            tokens=int(self._seq_lens.sum()),
        )

    def attend(
        self, layer: int, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`[N, Hq, D]` of `q` `[N, Hq, D]`."""
        g = self._geometry
        lists = counts = None
        tail = self._tail if layer not in self._dense else None
        if layer not in self._dense:
            self._select(layer, q, k_pool, v_pool, scale)
            lists, counts = self._lists, self._counts
            if self._record:
                self._record(layer, lists, counts)
            self._kept_blocks[layer] = counts.double()
        out = torch.empty_like(q)
        given = None
        if tail:
            means = tail.allocate(self._pool_pages, q.device)
            tail.update(v_pool, self._closed_pages, means)
            given = AttentionTail(self._log_mass, self._kept_mask, means)
        sparse_attention(
            q,
            k_pool,
            v_pool,
            self._page_table,
            self._seq_lens,
            lists,
            counts,
            scale=scale,
            page_size=g.page_size,
            block_size=g.block_size,
            out=out,
            workspace=self._workspace,
            tail=given,
        )
        computes_tail = self._setting.tail_tokens > 0 and not tail
        if lists is None:
            self._coverage[layer] = 1.0
        elif self._measure or computes_tail:
            last = FIRST_SLOT + int(self._seq_lens[-1])
            exact = self._padded(
                block_log_mass(token_scores(q, k_pool[FIRST_SLOT:last], scale), self._seq_lens, g.block_size)
            )
            self._coverage[layer] = head_coverage(exact, self._seq_lens, self._lists, self._counts, g.block_size)
            if computes_tail:
                out = self._with_tail(out, exact, v_pool[FIRST_SLOT:last])
        return out

    def _padded(self, mass: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(mass, (0, self._blocks - mass.shape[-1]), value=float("-inf"))

    def _select(self, layer: int, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, scale: float) -> None:
        setting, g = self._setting, self._geometry
        summary = self._estimator.allocate(self._pool_pages, q.device)
        self._estimator.update(k_pool, self._closed_pages, summary)
        arguments: dict[str, Any] = {"scale": scale, "min_context": 0}
        self._estimator.block_mass(
            q,
            k_pool,
            summary,
            self._page_table,
            self._seq_lens,
            out=self._log_mass,
            block_max=self._maxima.blocks if self._maxima else None,
            **arguments,
        )
        if self._maxima:
            self._pseudo_maximum.write(q, k_pool, self._page_table, self._seq_lens, maxima=self._maxima, **arguments)
        log_mass = self._log_mass
        if setting.value_norm:
            norms = v_pool[FIRST_SLOT : FIRST_SLOT + self._blocks * g.block_size].float().norm(dim=-1)
            weight = norms.unflatten(0, (-1, g.block_size)).mean(1).clamp_min(1e-9).log()
            log_mass = log_mass + weight.T[:, None]
        self._rule.select(
            log_mass,
            self._seq_lens,
            thresholds=torch.tensor(self._rule.thresholds(layer), device=q.device).expand(len(q), -1),
            block_lists=self._lists,
            block_counts=self._counts,
            scratch=self._scratch,
            kept_total=self._kept_total,
            kept_mask=self._kept_mask,
            maxima=self._maxima,
        )
        tokens = self._seq_lens.sum().item()
        closed = (self._seq_lens // g.page_size * g.page_size).sum().item()
        served, charged = self._served, self._charged
        if isinstance(charged, ScreenedEstimator):
            assert isinstance(self._estimator, ScreenedEstimator)
            charged.scanned = self._estimator.scanned
        scanned = closed * charged.scan_bytes() + (tokens - closed) * served.kv_bytes / 2
        if setting.tail_tokens:
            # A mean value for so many tokens, in the type of the cache.
            scanned += closed / setting.tail_tokens * served.head_dim * served.dtype.itemsize
        self._scanned[layer] = scanned / (tokens * served.kv_bytes)

    def _with_tail(self, out: torch.Tensor, exact: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`out` joined with the mean values of the blocks that were not read, weighted by their estimated mass."""
        g = self._geometry
        chosen = chosen_blocks(self._lists, self._counts)[:, :, None]
        inside = (torch.arange(self._blocks, device=out.device) < self._row_blocks[:, None])[:, None, None]
        read = exact.masked_fill(~(chosen & inside), float("-inf")).logsumexp(-1, keepdim=True)
        missing = self._log_mass.masked_fill(chosen | ~inside, float("-inf"))
        weights = torch.cat((read, missing), -1).softmax(-1)
        size = self._setting.tail_tokens
        positions = torch.arange(0, -(-len(values) // size) * size, size, device=out.device)
        tokens = (len(values) - positions).clamp_max(size)[:, None, None]
        values = torch.nn.functional.pad(values.float(), (0, 0, 0, 0, 0, -len(values) % size))
        means = values.unflatten(0, (-1, size)).sum(1) / tokens
        means = means.repeat_interleave(size // g.block_size, 0)[: self._blocks]
        means = torch.nn.functional.pad(means, (0, 0, 0, 0, 0, self._blocks - len(means)))
        mixed = weights[..., :1] * out.float().view(*weights.shape[:3], -1)
        mixed += torch.einsum("bhgn,nhd->bhgd", weights[..., 1:], means)
        return mixed.flatten(1, 2).to(out.dtype)
