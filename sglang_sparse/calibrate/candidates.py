"""Estimators that only the harness knows: what was tried on the way to the server's, in plain torch.

A candidate is written as a scheme that replaces keys by what a low-bit copy would give back (`KeyScheme.reconstruct`),
with the bytes such a copy would take. They serve one sequence at a time: all rows of a batch must be steps of one
request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_sparse.geometry import Geometry
from sglang_sparse.selection import Estimator
from sglang_sparse.selection.estimators import Summary

NEGLIGIBLE = 0.005
"""Share of the estimated mass that screened-out blocks may hold together."""


class CandidateError(ValueError):
    """A candidate's name is not one; the message is one line."""


@dataclass(frozen=True)
class KeyScheme:
    """A copy of the keys of closed pages."""

    reconstruct: Callable[[torch.Tensor], torch.Tensor]
    """`[pages, page_size, Hkv, D]` fp32 keys to the keys that the copy stands for, of the same shape."""
    bytes_per_channel: float
    """Bytes a token and channel."""
    variance: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The keys to the variance of the copy's rounding, `[pages, 1, Hkv, D]`; given, masses are freed of its bias."""


# --- schemes -------------------------------------------------------------------------------------------------------


def _down(x: torch.Tensor, dtype: torch.dtype, bits: torch.dtype) -> torch.Tensor:
    """The largest values of a float `dtype` that are not above `x`, as fp32; `bits` is an int of its size."""
    rounded = x.to(dtype)
    pattern = rounded.view(bits)
    # Sign and magnitude: one further down is one less for positive numbers, one more for negative ones.
    smallest_negative = torch.tensor(torch.iinfo(bits).min + 1, dtype=bits, device=x.device)
    below = torch.where(pattern < 0, pattern + 1, torch.where(pattern == 0, smallest_negative, pattern - 1))
    return torch.where(rounded.float() > x, below, pattern).view(dtype).float()


def _bf16_down(x: torch.Tensor) -> torch.Tensor:
    return _down(x, torch.bfloat16, torch.int16)


def _fp8_down(x: torch.Tensor) -> torch.Tensor:
    # One pattern below the lowest is no number.
    return _down(x.clamp(-416, 448), torch.float8_e4m3fn, torch.int8)


def asymmetric(bits: int, page_size: int, meta: str = "bf16", *, unbiased: bool = False) -> KeyScheme:
    """Codes of `bits` bits between the lowest and highest value of each channel in a page.

    With `unbiased`, masses are corrected for the rounding: a uniform error of variance step^2 / 12 in each channel
    adds normal noise of variance s^2 = scale^2 * sum(q^2 step^2) / 12 to a score, which multiplies its exp by
    exp(s^2 / 2) in the mean.
    """
    down = _fp8_down if meta == "fp8" else _bf16_down
    levels = 2**bits - 1

    def low_step(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low = down(keys.amin(1, keepdim=True))
        return low, -down(-(keys.amax(1, keepdim=True) - low) / levels)

    def variance(keys: torch.Tensor) -> torch.Tensor:
        return low_step(keys)[1].square() / 12

    def reconstruct(keys: torch.Tensor) -> torch.Tensor:
        low, step = low_step(keys)
        codes = ((keys - low) / step.clamp_min(1e-30) + 0.5).floor().clamp(0, levels)
        return low + codes * step

    bytes_per_channel = bits / 8 + (2 if meta == "fp8" else 4) / page_size
    return KeyScheme(reconstruct, bytes_per_channel, variance if unbiased else None)


def symmetric_2bit(page_size: int) -> KeyScheme:
    """FFD's key code: levels ±0.5 s and ±1.5 s with s = max |k| / 1.5 of each channel and page, s in fp32."""

    def reconstruct(keys: torch.Tensor) -> torch.Tensor:
        s = (keys.abs().amax(1, keepdim=True) / 1.5).clamp_min(1e-30)
        return ((keys / s + 1.5).round().clamp(0, 3) - 1.5) * s

    return KeyScheme(reconstruct, 2 / 8 + 4 / page_size)


def fp8_means(tokens: int, page_size: int) -> KeyScheme:
    """Means of `tokens` neighbours in fp8, relative to the page's mean in bf16."""

    def reconstruct(keys: torch.Tensor) -> torch.Tensor:
        centre = keys.mean(1, keepdim=True).to(torch.bfloat16).float()
        means = (keys - centre).unflatten(1, (-1, tokens)).mean(2, keepdim=True)
        stored = means.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        return (stored + centre[:, :, None]).expand(-1, -1, tokens, -1, -1).flatten(1, 2)

    return KeyScheme(reconstruct, 1 / tokens + 2 / page_size)


def hadamard(size: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix of a power of two."""
    if size & (size - 1):
        raise CandidateError(f"rotation needs a head dim that is a power of two, not {size}")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def rotated(scheme: KeyScheme, head_dim: int) -> KeyScheme:
    """`scheme` on keys turned by a Hadamard matrix; the query is turned too, so only the rounding differs."""
    turn = hadamard(head_dim)

    def reconstruct(keys: torch.Tensor) -> torch.Tensor:
        matrix = turn.to(keys.device)
        return scheme.reconstruct(keys @ matrix) @ matrix.T

    return KeyScheme(reconstruct, scheme.bytes_per_channel)


# --- estimators ----------------------------------------------------------------------------------------------------


def _sequence(page_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> tuple[torch.Tensor, int]:
    """Slots `[T]` of the one sequence that all rows are steps of, and T."""
    longest = int(seq_lens.argmax())
    length = int(seq_lens[longest])
    pages = page_table[longest, : -(-length // page_size)].long()
    tokens = torch.arange(page_size, device=pages.device)
    return (pages[:, None] * page_size + tokens).flatten()[:length], length


def token_scores(q: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Scaled scores `[B, Hkv, G, T]` fp32 of `q [B, Hq, D]` and `keys [T, Hkv, D]`."""
    batch, _, head_dim = q.shape
    kv_heads = keys.shape[1]
    queries = q.float().view(batch, kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
    scores = torch.matmul(queries, keys.float().permute(1, 2, 0)) * scale
    return scores.view(kv_heads, batch, -1, keys.shape[0]).transpose(0, 1)


def block_log_mass(scores: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> torch.Tensor:
    """Log of the mass of each block, `[B, Hkv, G, ceil(T / block_size)]`, of the tokens before `seq_lens`."""
    positions = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill(positions >= seq_lens[:, None, None, None], float("-inf"))
    scores = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % block_size), value=float("-inf"))
    return scores.unflatten(-1, (-1, block_size)).logsumexp(-1)


def block_maximum(scores: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> torch.Tensor:
    """Largest score of each block, `[B, Hkv, G, ceil(T / block_size)]`, of the tokens before `seq_lens`."""
    positions = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill(positions >= seq_lens[:, None, None, None], float("-inf"))
    scores = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % block_size), value=float("-inf"))
    return scores.unflatten(-1, (-1, block_size)).amax(-1)


class CopyEstimator:
    """The mass under a low-bit copy of the keys."""

    def __init__(self, geometry: Geometry, scheme: KeyScheme, name: str) -> None:
        self.name = name
        self._geometry = geometry
        self._scheme = scheme

    def allocate(self, pages: int, device: torch.device | str) -> Summary:
        g = self._geometry
        copy = torch.zeros((pages, g.page_size, g.kv_heads, g.head_dim), device=device)
        return copy, torch.zeros((pages, g.kv_heads, g.head_dim), device=device)

    def summary_bytes(self) -> float:
        return self._scheme.bytes_per_channel * self._geometry.head_dim

    def scan_bytes(self) -> float:
        return self.summary_bytes()

    def update(
        self, k_pool: torch.Tensor, pages: torch.Tensor, summary: Summary, targets: torch.Tensor | None = None
    ) -> None:
        g = self._geometry
        targets = (pages if targets is None else targets)[pages >= 0].long()
        pages = pages[pages >= 0].long()
        keys = k_pool.view(-1, g.page_size, g.kv_heads, g.head_dim)[pages].float()
        summary[0][targets] = self._scheme.reconstruct(keys)
        if self._scheme.variance is not None:
            summary[1][targets] = self._scheme.variance(keys)[:, 0]

    def block_mass(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        summary: Summary,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        min_context: int,
        out: torch.Tensor,
        block_max: torch.Tensor | None = None,
    ) -> None:
        scores = self.scores(q, k_pool, summary, page_table, seq_lens, scale)
        mass = block_log_mass(scores, seq_lens, self._geometry.block_size)
        out[..., : mass.shape[-1]] = mass
        if block_max is not None:
            block_max[..., : mass.shape[-1]] = block_maximum(scores, seq_lens, self._geometry.block_size)

    def scores(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        summary: Summary,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Of tokens, `[B, Hkv, G, T]`; open pages exactly."""
        g = self._geometry
        slots, length = _sequence(page_table, seq_lens, g.page_size)
        scores = token_scores(q, summary[0].flatten(0, 1)[slots], scale)
        if self._scheme.variance is not None:
            noise = token_scores(q.float().square(), summary[1], scale**2)
            scores -= noise[..., slots // g.page_size] / 2
        closed = seq_lens // g.page_size * g.page_size
        first = int(closed.min())
        if first < length:
            exact = token_scores(q, k_pool[slots[first:]], scale)
            positions = torch.arange(first, length, device=q.device)
            is_open = positions >= closed[:, None, None, None]
            scores[..., first:] = torch.where(is_open, exact, scores[..., first:])
        return scores


class ScreenedEstimator:
    """`fine` where it can matter, `coarse` elsewhere: only blocks outside a negligible tail of `coarse` are scanned.

    With an upper bound as `coarse`, blocks are skipped whose bounds together are negligible against the whole mass
    under `fine`. A kernel could not know that before the scan: this is the most that any bound test could skip. After
    `block_mass`, `scanned` holds what was read.
    """

    def __init__(
        self, geometry: Geometry, coarse: Estimator, fine: CopyEstimator, name: str, *, shared: float, bounds: bool
    ) -> None:
        self.name = name
        self._geometry = geometry
        self._coarse = coarse
        self._fine = fine
        self._shared = shared
        self._bounds = bounds
        self.scanned: torch.Tensor | None = None
        """`[B, Hkv]`, the share of closed blocks whose fine codes were read."""

    def allocate(self, pages: int, device: torch.device | str) -> Summary:
        coarse = self._coarse.allocate(pages, device)
        self._split = len(coarse)
        return (*coarse, *self._fine.allocate(pages, device))

    def summary_bytes(self) -> float:
        return self._coarse.summary_bytes() + self._fine.summary_bytes() - self._shared

    def scan_bytes(self) -> float:
        """As measured by the last `block_mass`."""
        assert self.scanned is not None
        fine = self._fine.summary_bytes() - self._shared
        return self._coarse.scan_bytes() + fine * float(self.scanned.mean())

    def update(
        self, k_pool: torch.Tensor, pages: torch.Tensor, summary: Summary, targets: torch.Tensor | None = None
    ) -> None:
        self._coarse.update(k_pool, pages, summary[: self._split], targets)
        self._fine.update(k_pool, pages, summary[self._split :], targets)

    def block_mass(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        summary: Summary,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        min_context: int,
        out: torch.Tensor,
        block_max: torch.Tensor | None = None,
    ) -> None:
        if block_max is not None:
            raise ValueError(f"estimator {self.name} guesses no scores of tokens")
        g = self._geometry
        scores = self._fine.scores(q, k_pool, summary[self._split :], page_table, seq_lens, scale)
        fine = block_log_mass(scores, seq_lens, g.block_size)
        coarse = torch.full_like(fine, float("-inf"))
        self._coarse.block_mass(
            q, k_pool, summary[: self._split], page_table, seq_lens, scale=scale, min_context=0, out=coarse
        )
        blocks = torch.arange(fine.shape[-1], device=q.device)
        coarse = coarse.masked_fill(blocks * g.block_size >= seq_lens[:, None, None, None], float("-inf"))
        # The smallest blocks that together hold at most NEGLIGIBLE of the mass, in every head of the group.
        total = (fine if self._bounds else coarse).logsumexp(-1, keepdim=True)
        shares, order = (coarse - total).exp().sort(-1)
        dropped = torch.zeros_like(shares, dtype=torch.bool).scatter_(-1, order, shares.cumsum(-1) <= NEGLIGIBLE)
        skip = dropped.all(2, keepdim=True)
        closed = (seq_lens // g.page_size * g.page_size // g.block_size)[:, None]
        is_closed = blocks < closed[..., None]
        read = (~skip[:, :, 0] & is_closed).sum(-1)
        self.scanned = read / closed.clamp_min(1)
        instead = torch.full_like(coarse, float("-inf")) if self._bounds else coarse
        out[..., : fine.shape[-1]] = torch.where(skip & is_closed[:, :, None], instead, fine)


class PageBound:
    """Upper bound of each block's log mass from its page's low and high keys: block_size * exp(the largest score)."""

    name = "page-bound"

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def allocate(self, pages: int, device: torch.device | str) -> Summary:
        g = self._geometry
        return (torch.zeros((pages, 2, g.kv_heads, g.head_dim), device=device),)

    def summary_bytes(self) -> float:
        return 4 * self._geometry.head_dim / self._geometry.page_size

    def scan_bytes(self) -> float:
        return self.summary_bytes()

    def update(
        self, k_pool: torch.Tensor, pages: torch.Tensor, summary: Summary, targets: torch.Tensor | None = None
    ) -> None:
        g = self._geometry
        targets = (pages if targets is None else targets)[pages >= 0].long()
        pages = pages[pages >= 0].long()
        keys = k_pool.view(-1, g.page_size, g.kv_heads, g.head_dim)[pages].float()
        summary[0][targets] = torch.stack((keys.amin(1), keys.amax(1)), 1)

    def block_mass(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        summary: Summary,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        min_context: int,
        out: torch.Tensor,
        block_max: torch.Tensor | None = None,
    ) -> None:
        if block_max is not None:
            raise ValueError(f"estimator {self.name} guesses no scores of tokens")
        g = self._geometry
        longest = int(seq_lens.argmax())
        pages = page_table[longest, : -(-int(seq_lens[longest]) // g.page_size)].long()
        low, high = summary[0][pages].unbind(1)
        # The largest score of a box: each channel takes the end that its query's sign prefers.
        bound = token_scores(q.clamp_min(0), high, scale) + token_scores(q.clamp_max(0), low, scale)
        bound = (bound + math.log(g.block_size)).repeat_interleave(g.blocks_per_page, -1)
        blocks = out.shape[-1]
        bound = bound[..., :blocks]
        closed = (seq_lens // g.page_size * g.page_size // g.block_size)[:, None, None, None]
        positions = torch.arange(bound.shape[-1], device=q.device)
        # Open pages are always read: an infinite bound would hide all others.
        out[..., : bound.shape[-1]] = bound.masked_fill(positions >= closed, float("-inf"))


# --- names ---------------------------------------------------------------------------------------------------------


def make_candidate(name: str, geometry: Geometry) -> Estimator:
    """The estimator of a name.

    Names: `symmetric-2bit`; `asymmetric-Bbit[-fp8][-unbiased|-rotated]`; `means-N-fp8`; `bound+asymmetric-…`;
    `mean+asymmetric-…` (block means in bf16 first).

    Raises:
        CandidateError: no candidate has this name.
    """
    for prefix in ("bound+", "mean+"):
        if name.startswith(prefix):
            inner = name.removeprefix(prefix)
            if not re.fullmatch(r"asymmetric-\dbit", inner):
                raise CandidateError(f"{name!r} is no candidate estimator")
            fine = make_candidate(inner, geometry)
            assert isinstance(fine, CopyEstimator)
            if prefix == "bound+":
                bound = PageBound(geometry)
                # The bound is made of the low and step that the codes need anyway.
                return ScreenedEstimator(geometry, bound, fine, name, shared=bound.summary_bytes(), bounds=True)
            from sglang_sparse.selection.estimators import StatisticsEstimator

            mean = StatisticsEstimator(geometry, "mean")
            return ScreenedEstimator(geometry, mean, fine, name, shared=0.0, bounds=False)
    if name == "symmetric-2bit":
        return CopyEstimator(geometry, symmetric_2bit(geometry.page_size), name)
    if match := re.fullmatch(r"means-(\d+)-fp8", name):
        return CopyEstimator(geometry, fp8_means(int(match[1]), geometry.page_size), name)
    if match := re.fullmatch(r"asymmetric-(\d)bit(-fp8)?(-unbiased|-rotated)?", name):
        meta = "fp8" if match[2] else "bf16"
        scheme = asymmetric(int(match[1]), geometry.page_size, meta, unbiased=match[3] == "-unbiased")
        return CopyEstimator(geometry, rotated(scheme, geometry.head_dim) if match[3] == "-rotated" else scheme, name)
    raise CandidateError(f"{name!r} is no candidate estimator")
