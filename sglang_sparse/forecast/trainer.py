"""Training of forecast heads: the model is frozen and runs over each sequence; each layer's heads learn on the way.

Memory: a layer's attention sees its queries and keys, and the input of the layer before has been kept at the sampled
queries alone. So the loss of a layer is computed and differentiated while the model is in that layer, and a sequence of
32k tokens needs little more than its forward pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_sparse.calibrate.model import load_model

from .distillation import block_log_masses, choosable, divergence, group_log_shares, recall
from .errors import ForecastError
from .heads_file import Heads
from .least_squares import Sums, best_change
from .model_parts import ModelParts, parts_of_transformers
from .projections import next_query
from .recording import watch_inputs
from .training_state import FIT, Progress, Recipe, read_checkpoint, write_checkpoint

QUERY_CHUNK = 32
"""Queries whose scores are held at once, with their gradients."""

TOKEN_CHUNK = 4096
"""Tokens whose inputs and queries are held at once in float64."""


class Trainer:
    """Heads of one model under training.

    Args:
        folder: of the model.
        sequences: `[n, T]` int64; the last one is held out, if there are more than one.
        checkpoint: file that is read if it is there, and written as training goes.

    Raises:
        CalibrationError, ForecastError: the model cannot be loaded, or the checkpoint is of another run.
    """

    def __init__(
        self, folder: Path, sequences: torch.Tensor, recipe: Recipe, *, device: str, checkpoint: Path | None = None
    ) -> None:
        self.recipe, self.device = recipe, torch.device(device)
        self._sequences = sequences[:-1] if len(sequences) > 1 else sequences
        self._held_out = sequences[-1]
        dtype = None if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
        self.model = load_model(folder, self._attention, device=device, dtype=dtype).requires_grad_(False)
        self.parts: ModelParts = parts_of_transformers(self.model, positions=sequences.shape[1])
        self.identity = self.parts.identity()
        group = self.parts.layers[0].projection.weight.shape[0] // (self.parts.kv_heads * self.parts.head_dim)
        if recipe.vectors < 1 or group % recipe.vectors:
            raise ForecastError(
                f"--vectors is {recipe.vectors}, which does not divide the {group} query heads of a KV head"
            )
        self._layers = list(self.parts.forecastable())
        self._seen: dict[int, torch.Tensor] = {}
        self._visit: Callable[[int, torch.Tensor, torch.Tensor, float], None] = lambda *_: None
        self.heads = self._start()
        parameters = [tensor for pair in self.heads.values() for tensor in pair if tensor is not None]
        self._optimiser = torch.optim.AdamW(
            parameters, lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        self.progress = Progress(0, [], {layer: [] for layer in self._layers}, [])
        self._checkpoint = checkpoint
        if checkpoint is not None and checkpoint.exists():
            self.progress = read_checkpoint(checkpoint, recipe, self.identity, self.heads, self._optimiser, self.device)

    # --- the model's forward pass ------------------------------------------------------------------------------------

    def _attention(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **more: Any
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention interface: dense and causal, and what a layer's heads learn from on the way."""
        scaling = more.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        self._visit(module.layer_idx, query[0].transpose(0, 1), key[0].transpose(0, 1), scale)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    def _pass(self, sequence: torch.Tensor, visit: Callable[[int, torch.Tensor, torch.Tensor, float], None]) -> None:
        """Runs the model over `[T]` tokens, `visit` in each layer with its number, queries, keys and scale."""
        self._visit = visit
        self._seen.clear()
        with torch.no_grad(), watch_inputs(self.parts, self._seen):
            self.model.model(input_ids=sequence[None].to(self.device), use_cache=False)
        self._seen.clear()

    def _positions(self, count: int, tokens: int, seed: str) -> torch.Tensor:
        """`[n]` int64: ascending places of queries that have something to choose."""
        first = self.recipe.sink + self.recipe.window + 2 * self.recipe.block
        places = range(min(first, tokens - 1), tokens)
        drawn = random.Random(seed).sample(places, min(count, len(places)))
        return torch.tensor(sorted(drawn), device=self.device)

    def _start(self) -> Heads:
        """The next layer's own query projection, which is what `query` does without training."""
        inputs: dict[int, torch.Tensor] = {}
        if any(self.parts.layers[layer].projection.head_norm is not None for layer in self._layers):

            def note(layer: int, *_: Any) -> None:
                if layer + 1 in self._layers:
                    inputs[layer] = self._seen.pop(layer)[0, :: max(1, self._sequences.shape[1] // 256)]

            self._pass(self._sequences[0], note)
        heads: Heads = {}
        for layer in self._layers:
            projection = next_query(self.parts, layer)
            if layer - 1 in inputs:
                projection = projection.linearised(inputs[layer - 1])
            folded = projection.folded(self.parts.kv_heads * self.recipe.vectors)
            weight, bias = folded.weight.float().clone(), folded.bias
            if bias is None and self.recipe.start == FIT:
                bias = torch.zeros_like(weight[:, 0])
            bias = None if bias is None else bias.float().clone().requires_grad_()
            heads[layer] = (weight.requires_grad_(), bias)
        return heads

    def _vectors(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        weight, bias = self.heads[layer]
        made = torch.nn.functional.linear(x.float(), weight, bias)
        rotary = self.parts.layers[layer].rotary
        assert rotary is not None
        return rotary(made.unflatten(-1, (self.parts.kv_heads, self.recipe.vectors, self.parts.head_dim)), positions)

    def _visit_layers(
        self, positions: torch.Tensor, use: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, int], None]
    ) -> Callable[[int, torch.Tensor, torch.Tensor, float], None]:
        """Calls `use` with a layer, true and guessed log shares, choosable blocks and the chunk's queries."""
        recipe, before = self.recipe, dict[int, torch.Tensor]()

        def visit(layer: int, queries: torch.Tensor, keys: torch.Tensor, scale: float) -> None:
            # Of the layer's own input only the sampled places are kept, for the next layer.
            before[layer] = self._seen.pop(layer)[0, positions]
            x = before.pop(layer - 1, None)
            if x is None or layer not in self._layers:
                return
            own = queries[positions].float().unflatten(1, (self.parts.kv_heads, -1))
            for start in range(0, len(positions), QUERY_CHUNK):
                chunk = slice(start, start + QUERY_CHUNK)
                places = positions[chunk]
                valid = choosable(places, len(keys), block=recipe.block, sink=recipe.sink, window=recipe.window)

                def shares(vectors: torch.Tensor, places: Any = places, valid: Any = valid) -> torch.Tensor:
                    masses = block_log_masses(vectors, keys, places, scale=scale, block=recipe.block)
                    return group_log_shares(masses, valid)

                true = shares(own[chunk])
                with torch.enable_grad():
                    use(layer, true, shares(self._vectors(layer, x[chunk], places)), valid, len(places))

        return visit

    @torch.no_grad()
    def fit(self) -> None:
        """Moves the heads to where the true queries of `recipe.fit_sequences` sequences are nearest, by least squares.

        The first tokens, whose hidden states are like no others', do not count. Of a single sequence the second half
        says how far the first is to be believed."""
        fitted, first = self._sequences[: self.recipe.fit_sequences], self.recipe.sink
        only = len(self._sequences) == 1 and torch.equal(self._held_out, self._sequences[0])
        half = len(self._held_out) // 2
        known = self._sums([fitted[0][:half]] if only else [*fitted], first)
        others = self._sums([self._held_out], half if only else first)
        for layer, (weight, bias) in self.heads.items():
            change = best_change(known.pop(layer), others.pop(layer)).to(weight)
            weight += change[:-1].T
            if bias is not None:
                bias += change[-1]

    def _sums(self, sequences: Iterable[torch.Tensor], first: int) -> dict[int, Sums]:
        """What the heads lack of the true queries, by layer, over all tokens from `first` on."""
        sums: dict[int, Sums] = {}

        def visit(layer: int, *_: Any) -> None:
            before[layer] = self._seen.pop(layer)[0, first:]
            x = before.pop(layer - 1, None)
            if x is None or layer not in self._layers:
                return
            weight, bias = self.heads[layer]
            for start in range(0, len(x), TOKEN_CHUNK):
                chunk = slice(start, start + TOKEN_CHUNK)
                true = self.parts.layers[layer].projection(before[layer][chunk])
                true = true.unflatten(1, (self.parts.kv_heads * self.recipe.vectors, -1)).mean(2).flatten(1)
                inputs = x[chunk].float()
                found = Sums.of(inputs, true - torch.nn.functional.linear(inputs, weight, bias))
                if layer in sums:
                    sums[layer].add(found)
                else:
                    sums[layer] = found

        for sequence in sequences:
            before: dict[int, torch.Tensor] = {}
            self._pass(sequence, visit)
        return sums

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> float:
        """One step of the optimiser; its loss, mean over layers. All it draws follows from its number."""
        recipe, number = self.recipe, self.progress.step
        # Read at the end of the step: each reading waits for the device.
        losses = {layer: torch.zeros((), device=self.device) for layer in self._layers}
        self._optimiser.zero_grad(set_to_none=True)
        for place in range(recipe.batch):
            index = self._order(number * recipe.batch + place)
            sequence = self._sequences[index]
            positions = self._positions(recipe.queries, len(sequence), f"{recipe.seed}-{number}-{place}")
            learn = partial(self._learn, losses, len(positions))
            self._pass(sequence, self._visit_layers(positions, learn))
        for pair in self.heads.values():
            # Layers learn on their own: a large gradient in one is no reason to hold the others back.
            torch.nn.utils.clip_grad_norm_([tensor for tensor in pair if tensor is not None], recipe.clip)
        self._optimiser.step()
        by_layer = torch.stack(list(losses.values())).tolist()
        for layer, loss in zip(losses, by_layer, strict=True):
            self.progress.layer_losses[layer].append(loss)
        mean = sum(by_layer) / len(by_layer)
        self.progress.losses.append(mean)
        self.progress.step += 1
        return mean

    def _learn(
        self,
        losses: dict[int, torch.Tensor],
        total: int,
        layer: int,
        true: torch.Tensor,
        guess: torch.Tensor,
        valid: torch.Tensor,
        queries: int,
    ) -> None:
        """Adds the gradient and the loss of some of a sequence's `total` queries."""
        loss = divergence(true, guess, valid, self.recipe.top) * (queries / total / self.recipe.batch)
        loss.backward()
        losses[layer] += loss.detach()

    def _order(self, place: int) -> int:
        """Which sequence is the `place`-th: each epoch has an order of its own."""
        count = len(self._sequences)
        epoch, inner = divmod(place, count)
        order = list(range(count))
        random.Random(f"{self.recipe.seed}-epoch-{epoch}").shuffle(order)
        return order[inner]

    def evaluate(self) -> float:
        """Recall on the sequence that is held out, noted in `progress`: mean over layers."""
        positions = self._positions(self.recipe.queries, len(self._held_out), f"{self.recipe.seed}-held-out")
        found: dict[int, float] = dict.fromkeys(self._layers, 0.0)

        def measure(layer: int, true: torch.Tensor, guess: torch.Tensor, valid: torch.Tensor, queries: int) -> None:
            found[layer] += recall(true, guess.detach(), valid, self.recipe.gamma).item() * queries / len(positions)

        self._pass(self._held_out, self._visit_layers(positions, measure))
        mean = sum(found.values()) / len(found)
        self.progress.recalls.append((self.progress.step, mean, found))
        return mean

    def run(self, *, save_every: int, after_step: Callable[[float], None] = lambda _: None) -> None:
        """All steps that are left; `after_step` gets each step's loss. Writes the checkpoint every `save_every`."""
        progress, recipe = self.progress, self.recipe
        if not progress.recalls:
            self.evaluate()
            if recipe.start == FIT:
                self.fit()
                self.evaluate()
                self.save()
        while progress.step < recipe.steps:
            loss = self.step()
            if progress.step % recipe.evaluate_every == 0 or progress.step == recipe.steps:
                self.evaluate()
            if progress.step % save_every == 0 or progress.step == recipe.steps:
                self.save()
            after_step(loss)

    def save(self) -> None:
        """Writes the checkpoint. What a step draws follows from its number: no other state of random numbers exists."""
        if self._checkpoint is not None:
            write_checkpoint(self._checkpoint, self.recipe, self.identity, self.heads, self._optimiser, self.progress)
