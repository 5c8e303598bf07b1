"""Shares of blocks kept, row by row: recorded from a real model, or drawn.

`kept_profiles.json` holds what the default setting kept in each layer and KV head of two models, and says how it was
recorded.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist

import torch

from .errors import BenchmarkError

PROFILES = Path(__file__).with_name("kept_profiles.json")
LOGNORMAL_SPREAD = 0.8
"""Standard deviation of the log of a row's share in `lognormal`: as uneven as the recorded heads are."""


def profile_names() -> list[str]:
    return sorted(json.loads(PROFILES.read_text())["profiles"])


def read_profile(name: str) -> torch.Tensor:
    """The recorded shares of a profile, `[layers, Hkv]` fp32. Raises BenchmarkError if there is none of that name."""
    profiles = json.loads(PROFILES.read_text())["profiles"]
    if name not in profiles:
        raise BenchmarkError(f"--kept {name}: no such profile: use one of {', '.join(sorted(profiles))}")
    return torch.tensor(profiles[name]["kept_by_head"])


def is_number(kept: float | str) -> bool:
    """Whether `kept` is one share for all rows."""
    try:
        float(kept)
    except ValueError:
        return False
    return True


def draw_kept(kept: str, rows: int, seed: int = 0) -> torch.Tensor:
    """The share of blocks that each of `rows` rows is to keep, `[rows]` fp32, above 0 and at most 1.

    Args:
        kept: a share such as `0.2` for all rows; `lognormal:MEAN`, a skewed distribution of that mean; or the name of a
            recorded profile, whose heads are drawn from.

    Raises:
        BenchmarkError: `kept` is none of these.
    """
    rng = torch.Generator().manual_seed(seed)
    name, _, mean_text = kept.partition(":")
    try:
        share = float(mean_text if name == "lognormal" else kept)
    except ValueError:
        if name == "lognormal":
            raise BenchmarkError(f"--kept {kept}: give the mean, such as lognormal:0.2") from None
        recorded = read_profile(kept).flatten()
        # Every head about equally often, so that the mean of few rows is the profile's too.
        order = torch.cat([torch.randperm(len(recorded), generator=rng) for _ in range(-(-rows // len(recorded)))])
        return recorded[order[:rows]]
    if not 0 < share <= 1:
        raise BenchmarkError(f"--kept {kept}: give a share above 0 and at most 1")
    if name != "lognormal":
        return torch.full((rows,), share)
    # Evenly spaced quantiles in random order: the mean of the rows hardly depends on the seed.
    quantiles = (torch.randperm(rows, generator=rng) + 0.5) / rows
    normal = NormalDist(math.log(share) - LOGNORMAL_SPREAD**2 / 2, LOGNORMAL_SPREAD)
    return torch.tensor([min(math.exp(normal.inv_cdf(q)), 1.0) for q in quantiles.tolist()])
