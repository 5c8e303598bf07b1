"""From memory to pages, slots and tokens; refusals before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparse_kernels.host_block import packed_bytes
from sparse_kernels.slot_maps import MAX_POOL_BLOCKS

from sglang_sparse.geometry import Geometry
from sglang_sparse.offload.errors import OffloadError
from sglang_sparse.offload.limits import MemoryLimit
from sglang_sparse.option_values import GIB, flag

HOST_FLAG = flag("host_memory")
HOT_FLAG = flag("hot_cache")
STAGING_FLAG = flag("staging")

MIN_HOT_SHARE = 0.25
"""Of the GPU memory left by open pages and staging, for slots, unless the hot cache has a size: a pool of which nothing
is cached would be read over PCIe alone."""

INDEX_LIMIT = 2**31 - 1
"""Kernels count blocks and tokens of a layer in int32; what they make of that into addresses is int64."""

LONG_SEQUENCE = 128 << 10
"""Tokens of the sequences that sizes are told in."""


@dataclass(frozen=True)
class OffloadShape:
    """What sizes depend on."""

    geometry: Geometry
    layers: int
    summary_bytes: float
    """Bytes a token that summaries of one layer and KV head take on the GPU, mean values included."""
    open_rows: int
    """Requests that may decode at once, and SGLang's padding row."""
    float8_host: bool = False
    """Whether the host pool has float8 blocks."""

    @property
    def heads(self) -> int:
        return self.layers * self.geometry.kv_heads

    @property
    def block_bytes(self) -> int:
        return self.geometry.block_size * self.geometry.kv_bytes

    @property
    def host_block_bytes(self) -> int:
        g = self.geometry
        return packed_bytes(g.block_size, g.head_dim) if self.float8_host else self.block_bytes

    @property
    def host_page_bytes(self) -> int:
        return self.heads * self.geometry.blocks_per_page * self.host_block_bytes

    @property
    def gpu_page_bytes(self) -> float:
        """On the GPU for each page of the host pool: summaries, and the slot of each block."""
        g = self.geometry
        return self.heads * (g.page_size * self.summary_bytes + g.blocks_per_page * 4)

    @property
    def slot_bytes(self) -> int:
        """Of one slot in each layer and KV head: a block, its number, its stamp, its places on three lists."""
        return self.heads * (self.block_bytes + 2 * 4) + 3 * self.geometry.kv_heads * 3 * 4

    @property
    def open_bytes(self) -> int:
        return self.open_rows * self.heads * self.geometry.page_size * self.geometry.kv_bytes

    @property
    def most_pages(self) -> int:
        """Of which tokens, and the blocks of one layer over KV heads, can be numbered."""
        g = self.geometry
        return min(
            INDEX_LIMIT // g.page_size,
            MAX_POOL_BLOCKS // g.blocks_per_page,
            INDEX_LIMIT // (g.kv_heads * g.blocks_per_page),
        )


@dataclass(frozen=True)
class OffloadSizes:
    """What fits. Bytes are those of all layers."""

    host_pages: int
    """The padding page included."""
    slots: tuple[int, ...]
    """Of each layer, for each of its KV heads."""
    staging_tokens: int
    """Of the prefixes of a prefill batch."""
    host_bytes: int
    summary_bytes: int
    hot_bytes: int
    staging_bytes: int
    open_bytes: int
    page_size: int
    host_block_bytes: int
    """Of a block of one layer and KV head: what a miss reads."""

    @property
    def tokens(self) -> int:
        """What the scheduler may hand out."""
        return (self.host_pages - 1) * self.page_size

    @property
    def long_sequences(self) -> float:
        return self.tokens / LONG_SEQUENCE

    def describe(self) -> str:
        """One line for the log."""
        slots = str(self.slots[0]) if len(set(self.slots)) == 1 else f"{min(self.slots)} to {max(self.slots)}"
        parts = (
            f"offload: {self.host_pages} host pages ({self.host_bytes / GIB:.1f} GiB) hold {self.tokens} tokens, or "
            f"{self.long_sequences:.1f} sequences of 128k",
            f"on the GPU summaries and maps {self.summary_bytes / GIB:.2f} GiB",
            f"{slots} slots a layer and KV head {self.hot_bytes / GIB:.2f} GiB",
            f"open pages {self.open_bytes / GIB:.2f} GiB",
            f"staging of {self.staging_tokens} tokens {self.staging_bytes / GIB:.2f} GiB",
        )
        return ", ".join(parts)


def check_shape(shape: OffloadShape) -> None:
    """Raises OffloadError if blocks cannot be copied in pieces of 16 bytes."""
    g = shape.geometry
    if g.head_dim * g.dtype.itemsize % 16:
        raise OffloadError(
            f"--sparse-decode-offload: head dim {g.head_dim} of {g.dtype} has {g.head_dim * g.dtype.itemsize} bytes a "
            "token, which 16 does not divide: serve this model without offload"
        )


def check_host_bytes(asked: int, limit: MemoryLimit) -> None:
    """Raises OffloadError if more host memory is asked for than there is."""
    if asked > limit.available:
        raise OffloadError(
            f"{HOST_FLAG} asks for {asked / GIB:.1f} GiB, but {limit.name} of {limit.limit / GIB:.1f} GiB leaves "
            f"{limit.available / GIB:.1f} GiB: ask for less"
        )


def share_slots(total: int, layers: int, shares: Sequence[float] | None, most: int) -> tuple[int, ...]:
    """`total` slots over layers, equally or by `shares`, up to `most` in each; what a layer cannot use goes to others
    by their shares, and rounding loses less than one a layer."""
    if shares is None:
        shares = (1.0,) * layers
    if len(shares) != layers or min(shares) < 0 or not sum(shares) > 0:
        raise OffloadError(f"{HOT_FLAG}: {len(shares)} shares do not fit {layers} layers")
    full: set[int] = set()
    while True:
        left = total - most * len(full)
        whole = sum(share for layer, share in enumerate(shares) if layer not in full)
        given = [
            most if layer in full else int(left * share / whole) if whole else 0 for layer, share in enumerate(shares)
        ]
        over = {layer for layer, count in enumerate(given) if count > most}
        if not over:
            return tuple(given)
        full |= over


def plan_sizes(
    shape: OffloadShape,
    *,
    host_bytes: int,
    gpu_bytes: int,
    staging_tokens: int,
    hot_bytes: int | None = None,
    shares: Sequence[float] | None = None,
) -> OffloadSizes:
    """What fits into host memory and the GPU's KV budget.

    Open pages and staging come first, then summaries for as many pages as the host holds, then slots: `hot_bytes`, or
    what is left, at least `MIN_HOT_SHARE`. If all does not fit, the host pool shrinks until its summaries do.

    Args:
        host_bytes: for the pool.
        gpu_bytes: what SGLang would give to KV.
        staging_tokens: tokens of prefixes that a prefill batch may have.
        hot_bytes: for slots.
        shares: of the slots, by layer.

    Raises:
        OffloadError: nothing useful fits; names the flag, what it asks for and what there is.
    """
    check_shape(shape)
    g = shape.geometry
    # Two layers' prefixes, and the contiguous copy that attention reads.
    staging = 3 * staging_tokens * g.kv_heads * g.kv_bytes
    fixed = staging + shape.open_bytes
    if fixed > gpu_bytes:
        raise OffloadError(
            f"{STAGING_FLAG} of {staging_tokens} tokens and {shape.open_rows} open pages take {fixed / GIB:.2f} GiB of "
            f"the GPU, whose KV budget is {gpu_bytes / GIB:.2f} GiB: lower it or --max-running-requests"
        )
    left = gpu_bytes - fixed
    if hot_bytes is not None and hot_bytes > left:
        raise OffloadError(
            f"{HOT_FLAG} asks for {hot_bytes / GIB:.2f} GiB, but open pages and staging leave {left / GIB:.2f} of the "
            f"GPU's KV budget of {gpu_bytes / GIB:.2f} GiB: ask for less"
        )
    kept_for_slots = int(MIN_HOT_SHARE * left) if hot_bytes is None else hot_bytes
    pages = min(
        host_bytes // shape.host_page_bytes,
        int((left - kept_for_slots) / shape.gpu_page_bytes),
        shape.most_pages,
    )
    # The padding page, and one to write to.
    if pages < 2:
        if host_bytes < 2 * shape.host_page_bytes:
            name, asked, needed = HOST_FLAG, host_bytes, 2.0 * shape.host_page_bytes
        else:
            name, asked, needed = HOT_FLAG, hot_bytes or 0, left - 2 * shape.gpu_page_bytes
        word = "at least" if name == HOST_FLAG else "at most"
        raise OffloadError(
            f"{name} of {asked / GIB:.3f} GiB leaves no room for a page of tokens: give {word} {needed / GIB:.3f} GiB"
        )
    summaries = int(pages * shape.gpu_page_bytes)
    hot = left - summaries if hot_bytes is None else hot_bytes
    # A cache cannot use more slots than there are blocks.
    total = min(int(hot / shape.slot_bytes), pages * g.blocks_per_page) * shape.layers
    slots = share_slots(total, shape.layers, shares, pages * g.blocks_per_page)
    return OffloadSizes(
        host_pages=int(pages),
        slots=slots,
        staging_tokens=staging_tokens,
        host_bytes=int(pages) * shape.host_page_bytes,
        summary_bytes=summaries,
        hot_bytes=sum(slots) * shape.slot_bytes // shape.layers,
        staging_bytes=staging,
        open_bytes=shape.open_bytes,
        page_size=g.page_size,
        host_block_bytes=shape.host_block_bytes,
    )
