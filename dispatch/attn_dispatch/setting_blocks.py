"""The public `with` blocks that change settings."""

from __future__ import annotations

from attn_dispatch.settings import (
    Block,
    ContextParallel,
    FallbackPolicy,
    ShardedDropout,
    checked_bool,
    checked_context,
    checked_dropout,
    checked_policy,
    checked_scratch,
    checked_seconds,
)


def fallback(policy: FallbackPolicy) -> Block:
    """Choose what happens, within the block, if no GPU kernel can run a call and XLA would run it.

        with attn_dispatch.fallback("error"):
            step(params, batch)

    Args:
      policy: "warn" (the default) warns once for each kind of call with an
        `AttentionFallbackWarning` that lists every reason. "error" raises a NotImplementedError
        with every reason, on a CPU too for the GPUs that `attn_dispatch.target` names. "silent"
        does nothing. The environment variable ATTN_DISPATCH_FALLBACK sets the policy outside such
        blocks.

    Raises:
      ValueError: for any other policy.
    """
    return Block("fallback", {"fallback": checked_policy(policy)})


def sharded_dropout(choice: ShardedDropout) -> Block:
    """Choose, within the block, whether dropout masks may depend on the number of devices.

    Args:
      choice: "own" (the default): each device draws from a different key, so another number of
        devices gives another mask. "same": the mask is the same on any number of devices. Calls
        with dropout, on a single device too, then run only on implementations that draw by the
        position in the whole call; of those included, XLA alone does. The environment variable
        ATTN_DISPATCH_SHARDED_DROPOUT sets the choice outside such blocks.

    Raises:
      ValueError: for anything else.
    """
    return Block("sharded_dropout", {"sharded_dropout": checked_dropout(choice)})


def context_parallel(strategy: ContextParallel) -> Block:
    """Choose, within the block, how calls are split whose arrays are sharded along the sequence.

        with attn_dispatch.context_parallel("ring"):
            step(params, batch)

    Args:
      strategy: "heads" exchanges the sequence for heads, so that each device has whole sequences of
        some heads. "gather", "ring" and "halo" leave rows where they are: each device gathers all
        keys, or passes them around, or receives the keys of a causal window from the device before
        it. "auto" (the default) takes the one with the least modelled time, which `explain` shows.
        So does a name that cannot run a call, except "heads": if heads and batch do not divide,
        devices repeat work, with a warning. The environment variable ATTN_DISPATCH_CONTEXT_PARALLEL
        sets the strategy outside such blocks.

    Raises:
      ValueError: for any other strategy.
    """
    return Block("context_parallel", {"context_parallel": checked_context(strategy)})


def rewrites(wanted: bool) -> Block:
    """Choose, within the block, whether a call that a kernel does not run may be rewritten.

    A rewrite turns the call into one that the kernel runs, with the same results; `explain` names
    the rewrites of a call.

    Args:
      wanted: True (the default) rewrites such calls; False leaves them to XLA. The environment
        variable ATTN_DISPATCH_REWRITES=0 means False outside such blocks.

    Raises:
      ValueError: for anything but a bool.
    """
    return Block("rewrites", {"rewrites": checked_bool(wanted, "rewrites")})


def aiter_asm(wanted: bool) -> Block:
    """Choose, within the block, whether AITER's hand-written ASM kernels may run calls.

    Args:
      wanted: True (the default) takes them wherever they run a call. False leaves their calls to
        AITER's CK kernels, and to XLA where CK is not built or does not run them. The environment
        variable ATTN_DISPATCH_AITER_ASM=0 means False outside such blocks.

    Raises:
      ValueError: for anything but a bool.
    """
    return Block("aiter_asm", {"aiter_asm": checked_bool(wanted, "aiter_asm")})


def finite_padding(promised: bool) -> Block:
    """Promise, within the block, that padding rows of query, key, value and out_grad are finite.

        with attn_dispatch.finite_padding(True):
            step(params, batch)

    Kernels then read these arrays as they are. Otherwise `flash` and `fa4` first set padding rows
    to 0, for which XLA copies arrays that anything else reads. The argument `finite_padding` of a
    call goes before this. See `dot_product_attention` for what NaN does where the promise is
    broken.

    Args:
      promised: True promises it. False (the default) does not. The environment variable
        ATTN_DISPATCH_FINITE_PADDING=1 means True outside such blocks.

    Raises:
      ValueError: for anything but a bool.
    """
    return Block("finite_padding", {"finite_padding": checked_bool(promised, "finite_padding")})


def scratch_limit(limit: int | str | None) -> Block:
    """Limit the scratch memory that a call may take, within the block.

        with attn_dispatch.scratch_limit("2GB"):
            step(params, batch)

    Scratch memory is what a call allocates beside its operands and results, in each direction. A
    call that would take more is computed in parts of the batch or of the heads, one after the
    other; gradients of operands that the parts share, such as a bias, are summed in float32.
    `explain` shows a call's scratch memory and its parts.

    Args:
      limit: bytes, or a size such as "500MB", "2GB" or "2GiB", or a share of the device's memory
        such as "5%". A kernel that takes more even in the smallest parts is not used. None, the
        default: 1.25 times what kernels take that keep no scores in memory, no more than XLA takes
        for the same call, at least 1/64 and at most 1/16 of the device's memory. A kernel that
        takes more even in the smallest parts is then used nevertheless. "off": no limit. The
        environment variable ATTN_DISPATCH_SCRATCH_LIMIT sets the limit outside such blocks.

    Raises:
      ValueError: for anything else.
    """
    return Block("scratch_limit", {"scratch_limit": checked_scratch(limit)})


def tuning(seconds: float = 30.0) -> Block:
    """Measure, within the block, what runs each call fastest on this device, and save the winner.

        with attn_dispatch.tuning(seconds=30):
            step(params, batch)  # the first call of a jitted step

    When a call without a saved winner is compiled, every implementation that can run it runs on
    random arrays, and so do cuDNN's other engines. Candidates whose results differ from those of
    the untuned choice are dropped. The fastest of the others is saved in a file, for this device
    and these library versions. Later calls use it, in other processes too, and `explain` shows it.
    The forward and the backward pass are tuned separately. Calls with dropout are not tuned,
    because both passes must draw the same mask.

    Tuning allocates arrays of the call's size beside the program's arrays. The block may be around
    the first call of a jitted function, or inside it around the attention calls to tune. A program
    that is compiled already is compiled again inside the block, and is unchanged outside it.

    The environment variable ATTN_DISPATCH_TUNING, a number of seconds, tunes without a block.
    ATTN_DISPATCH_WINNERS names the file.

    Args:
      seconds: the time, for each call and direction, after which no further candidate is tried.

    Raises:
      ValueError: for anything but a positive number of seconds.
    """
    return Block("tuning", {"tuning_seconds": checked_seconds(seconds)})
