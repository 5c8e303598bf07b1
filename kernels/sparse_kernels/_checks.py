"""Argument checks of the public functions. They read shapes and dtypes only: never a value on the device."""

import torch

HEAD_DIMS = (64, 96, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
BLOCK_SIZES = (8, 16, 32, 64)
KV_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_GROUP_SIZE = 16


def check_choice(name: str, value: object, allowed: tuple) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")


def check_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raises ValueError unless the tensor's dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(map(str, allowed))}")


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """Raises ValueError unless the tensor has this shape; None stands for any size."""
    given = tuple(tensor.shape)
    fits = len(given) == len(shape) and all(
        want is None or have == want for have, want in zip(given, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} has shape {list(given)}; needed: [{wanted}]")


def check_rows(name: str, tensor: torch.Tensor, rows: int, ndim: int = 1) -> None:
    """Raises ValueError unless the tensor has `ndim` dimensions and at least `rows` rows."""
    if tensor.ndim != ndim or tensor.shape[0] < rows:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; needed: {ndim} dimensions, at least {rows} rows")


def check_inner_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the tensor's last dimension is contiguous."""
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; needed: 1")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the tensor is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}; needed: a contiguous tensor")


def check_sizes(page_size: int, block_size: int | None = None) -> None:
    """Raises ValueError unless page and block size are supported and the block size divides the page size."""
    check_choice("page_size", page_size, PAGE_SIZES)
    if block_size is not None:
        check_choice("block_size", block_size, BLOCK_SIZES)
        if page_size % block_size:
            raise ValueError(f"block_size is {block_size}; needed: a divisor of page_size={page_size}")


def check_pool(name: str, pool: torch.Tensor, page_size: int) -> None:
    """Raises ValueError unless `pool` is `[P * page_size, Hkv, D]` of a supported dtype and head dimension."""
    check_shape(name, pool, None, None, None)
    check_dtype(name, pool, *KV_DTYPES)
    check_choice(f"head dimension of {name}", pool.shape[2], HEAD_DIMS)
    check_inner_contiguous(name, pool)
    if pool.shape[0] % page_size:
        raise ValueError(f"{name} has {pool.shape[0]} token slots; needed: a multiple of page_size={page_size}")


def check_targets(targets: torch.Tensor | None, pages: torch.Tensor) -> None:
    """Raises ValueError unless `targets` is None or names one page of a summary for each of `pages`."""
    if targets is not None:
        check_shape("targets", targets, pages.shape[0])
        check_dtype("targets", targets, torch.int32, torch.int64)
        check_contiguous("targets", targets)


def check_block_mass(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
    block_max: torch.Tensor | None = None,
) -> None:
    """Checks the arguments that all block-mass operations share."""
    check_sizes(page_size, block_size)
    check_pool("k_pool", k_pool, page_size)
    batch, kv_heads, head_dim = q.shape[0], k_pool.shape[1], k_pool.shape[2]
    check_shape("q", q, None, None, head_dim)
    check_dtype("q", q, k_pool.dtype)
    check_inner_contiguous("q", q)
    group_size, rest = divmod(q.shape[1], kv_heads)
    if rest or not 1 <= group_size <= MAX_GROUP_SIZE:
        raise ValueError(
            f"q has {q.shape[1]} heads for {kv_heads} KV heads; needed: a multiple, at most {MAX_GROUP_SIZE} each"
        )
    check_rows("page_table", page_table, batch, ndim=2)
    check_dtype("page_table", page_table, torch.int32)
    check_inner_contiguous("page_table", page_table)
    check_rows("seq_lens", seq_lens, batch)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_shape("out", out, batch, kv_heads, group_size, None)
    check_dtype("out", out, torch.float32)
    check_inner_contiguous("out", out)
    if block_max is not None:
        check_shape("block_max", block_max, *out.shape)
        check_dtype("block_max", block_max, torch.float32)
        if block_max.stride() != out.stride():
            raise ValueError(f"block_max has strides {list(block_max.stride())}; needed: out's, {list(out.stride())}")
