"""How the thread blocks of a cluster exchange values: through each other's shared memory, with inline PTX.

Triton has no words for it. A kernel that uses these is compiled for single blocks and launched as clusters
(`_cluster_launch`); block `i` of a cluster is its program `i`, counted from the cluster's first. All blocks of a
cluster must take part in each meeting, so conditions around one may depend only on what all of them see alike. Compute
capability 9.0 or higher.
"""

import triton
import triton.language as tl


@triton.jit
def size_of_cluster():
    """Blocks in this block's cluster; 1 if it was launched without."""
    return tl.inline_asm_elementwise("mov.u32 $0, %cluster_nctaid.x;", "=r", [], tl.int32, is_pure=True, pack=1)


@triton.jit
def announce_start():
    """Tells the cluster that this block runs: only then may others write to its shared memory. Does not wait."""
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_start():
    """Waits until all blocks of the cluster have announced themselves: once, before the first exchange."""
    tl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
    )


@triton.constexpr_function
def _buffer_asm(words: int) -> str:
    return f"{{ .shared .align 16 .b64 exchanged[{words}]; mov.u32 $0, exchanged; }}"


@triton.jit
def exchange_buffer(K: tl.constexpr, T: tl.constexpr):
    """Address of shared memory for exchanges of up to T words among the K blocks of a cluster. To be called once, where
    all of them come by."""
    if K == 1:
        return tl.zeros((), tl.int32)
    else:
        # Two halves: a block that is ahead writes to the one that no other reads any more, since they met after that.
        ASM: tl.constexpr = _buffer_asm(2 * K * T)
        return tl.inline_asm_elementwise(ASM, "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def exchange(mine, buffer, number, K: tl.constexpr, MOST: tl.constexpr):
    """`mine [T]` int64 of each of the cluster's K blocks, `[K, T]` int64, by block.

    A block's shared memory is not written to after its last exchange, so it may end then.

    Args:
        buffer: what `exchange_buffer` gave.
        number: int32, how many exchanges this block did before.
        MOST: what `exchange_buffer` took for T, at least T.
    """
    T: tl.constexpr = mine.shape[0]
    if K == 1:
        return mine[None, :]
    else:
        block = tl.broadcast_to(tl.arange(0, K)[:, None], (K, T))
        word = tl.broadcast_to(tl.arange(0, T)[None, :], (K, T))
        rank = tl.program_id(0) % K
        half = buffer + (number & 1) * (8 * K * MOST)
        # To every block, as its word from this one.
        tl.inline_asm_elementwise(
            "{ .reg .b32 there; mapa.shared::cluster.u32 there, $1, $2;"
            " st.relaxed.cluster.shared::cluster.b64 [there], $3; mov.u32 $0, 0; }",
            "=r,r,r,l",
            [half + (rank * T + word) * 8, block, tl.broadcast_to(mine[None, :], (K, T))],
            tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.inline_asm_elementwise(
            "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;",
            "=r",
            [],
            tl.int32,
            is_pure=False,
            pack=1,
        )
        # Apart from the barrier: the compiler may repeat this in another layout.
        here = half + (block * T + word) * 8
        return tl.inline_asm_elementwise("ld.shared.b64 $0, [$1];", "=l,r", [here], tl.int64, is_pure=False, pack=1)


@triton.jit
def exchange_pairs(first, second, buffer, number, K: tl.constexpr, MOST: tl.constexpr):
    """`exchange` of two fp32 `[T]` at once: `[K, T]` fp32 each."""
    low = first.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    high = second.to(tl.int32, bitcast=True).to(tl.int64) << 32
    got = exchange(low | high, buffer, number, K, MOST)
    return got.to(tl.int32).to(tl.float32, bitcast=True), (got >> 32).to(tl.int32).to(tl.float32, bitcast=True)
