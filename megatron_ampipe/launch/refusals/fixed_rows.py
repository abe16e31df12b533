"""What is refused with fixed rows."""

from __future__ import annotations

from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.launch.refusals.refusal import (
    DISPATCHER,
    Refusal,
    first_set,
    named_with,
    sends_rows,
    uses_hybridep,
)
from megatron_ampipe.schedule import Exchange

_NOT_WITH_FIXED_ROWS = (
    "--ampipe-condense",
    "--use-megatron-fsdp",
    # Zeroing gradients for the repeat would zero the parameters that a gather reads.
    "--reuse-grad-buf-for-mxfp8-param-ag",
    "--moe-enable-routing-replay",
    "--moe-routing-trace-path",
    "--qk-clip",
    "--log-max-attention-logit",
    "--skip-train",
)
"""Flags that are refused with ``--ampipe-rows fixed``, whatever their value."""


def _has_fixed_rows(args: Arguments) -> bool:
    return bool(args.ampipe_rows == "fixed")


def _other_exchange(args: Arguments) -> str | None:
    """The flag that asks for other transfers than the all-to-all of rows, or HybridEP's."""
    if uses_hybridep(args):
        return None
    if not sends_rows(args):
        return "--moe-flex-dispatcher-backend" if args.moe_token_dispatcher_type == "flex" else DISPATCHER
    return None if args.ampipe_exchange in (None, Exchange.ROWS) else "--ampipe-exchange"


def _single_products(args: Arguments) -> str | None:
    """The flag with which each expert has a separate product, whose size the host must know."""
    if args.transformer_impl in (None, "local"):
        # Grouped products of torch run in place of Megatron's local experts.
        return None
    is_grouped = args.transformer_impl == "transformer_engine" and args.moe_grouped_gemm
    return None if is_grouped else "--transformer-impl"


def _not_with_fixed_rows(args: Arguments) -> str | None:
    """The first flag that cannot be combined with ``--ampipe-rows fixed`` yet."""
    return first_set(args, *_NOT_WITH_FIXED_ROWS)


FIXED_ROWS: tuple[Refusal, ...] = (
    Refusal(
        "--ampipe-rows",
        "only the all-to-all of --ampipe-exchange rows, and HybridEP's, is built with fixed rows",
        "Leave it out, or use --moe-token-dispatcher-type alltoall --ampipe-exchange rows, or flex with "
        "--moe-flex-dispatcher-backend hybridep.",
        lambda args: _has_fixed_rows(args) and named_with(args, "--ampipe-rows", _other_exchange(args)),
    ),
    Refusal(
        "--ampipe-rows",
        "of these layers, only grouped experts of Transformer Engine take numbers of rows from the device",
        "Use --transformer-impl transformer_engine --moe-grouped-gemm, or --transformer-impl local.",
        lambda args: _has_fixed_rows(args) and named_with(args, "--ampipe-rows", _single_products(args)),
    ),
    Refusal(
        "--ampipe-rows",
        "operators of Transformer Engine's op fuser take the place of the experts' linear layers, and were "
        "not compared with exact rows",
        "Leave out --ampipe-rows, or --use-transformer-engine-op-fuser.",
        lambda args: (
            _has_fixed_rows(args)
            and named_with(args, "--ampipe-rows", first_set(args, "--use-transformer-engine-op-fuser"))
        ),
    ),
    Refusal(
        "--ampipe-rows",
        "HybridEP fills up the rows of an expert to other multiples than FP8 needs with fixed rows",
        "Leave out --ampipe-rows, or use --moe-token-dispatcher-type alltoall.",
        lambda args: (
            _has_fixed_rows(args)
            and uses_hybridep(args)
            and named_with(args, "--ampipe-rows", first_set(args, "--fp8-format"))
        ),
    ),
    Refusal(
        "--ampipe-rows",
        "HybridEP's fused kernels would wait for rows that were dropped",
        "Leave out --moe-permute-fusion-into-hybridep, or --ampipe-rows.",
        lambda args: (
            _has_fixed_rows(args)
            and uses_hybridep(args)
            and named_with(args, "--ampipe-rows", first_set(args, "--moe-permute-fusion-into-hybridep"))
        ),
    ),
    Refusal(
        "--ampipe-rows",
        "its budgets are learned, and with a factor for them Megatron would repeat steps, too",
        "Leave out --moe-expert-rank-capacity-factor, or --ampipe-rows.",
        lambda args: (
            _has_fixed_rows(args)
            and named_with(args, "--ampipe-rows", first_set(args, "--moe-expert-rank-capacity-factor"))
        ),
    ),
    Refusal(
        "--ampipe-rows",
        "is not built together with this flag yet",
        "Leave out --ampipe-rows, or the flag that is named with it.",
        lambda args: _has_fixed_rows(args) and named_with(args, "--ampipe-rows", _not_with_fixed_rows(args)),
    ),
    Refusal(
        "--ampipe-rows-margin",
        "has no effect without --ampipe-rows fixed",
        "Add --ampipe-rows fixed, or leave it out.",
        lambda args: not _has_fixed_rows(args),
    ),
)
"""Refused settings with ``--ampipe-rows fixed``."""
