"""What is refused of CUDA graphs."""

from __future__ import annotations

from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.block.settings import AUTO
from megatron_ampipe.launch.captured import asks_for_passes, captured_stages, captures_passes
from megatron_ampipe.launch.environment import passes_of_step
from megatron_ampipe.launch.refusals.refusal import Refusal, first_set, named_with

_GRAPHS = "--cuda-graph-impl"
_CHOOSING = ("--ampipe-plan", "--ampipe-save-plan", "--ampipe-cluster", "--ampipe-memory-budget")


def _captures_stages(args: Arguments) -> bool:
    """Whether graphs are of stages, or of Mamba layers, rather than of whole passes."""
    return not captures_passes(args) and not captured_stages(args).is_empty


def _chooses_without_graphs(args: Arguments) -> str | None:
    """The flag with which AMPipe predicts or measures what blocks without graphs would do."""
    flag = first_set(args, *_CHOOSING)
    if flag is None and args.ampipe_degree == AUTO:
        flag = "--ampipe-degree"
    return named_with(args, _GRAPHS, flag) if _captures_stages(args) else None


def _tries_passes(args: Arguments) -> str | None:
    """Whether graphs of the passes of every degree would have to be captured, each for a few iterations."""
    tries = args.ampipe_degree == AUTO and args.ampipe_cluster is None
    return named_with(args, _GRAPHS, "--ampipe-degree") if tries and captures_passes(args) else None


def _captures_nothing(args: Arguments) -> str | None:
    """The flag that forbids whole passes, where no stage can be captured either."""
    if not asks_for_passes(args):
        return None
    graphs = captured_stages(args)
    if not graphs.is_empty or graphs.no_passes is None:
        return None
    return f"{args.cuda_graph_impl} with {graphs.no_passes.split()[0].rstrip(':')}"


def _restores_in_stages(args: Arguments) -> str | None:
    """The flag that chooses a strategy of memory, which whole passes would have."""
    if not captures_passes(args):
        return None
    return named_with(args, _GRAPHS, first_set(args, "--ampipe-memory-budget"))


def _gathers_fp8(args: Arguments) -> str | None:
    """The flag with which parameters of whole passes are in FP8."""
    return named_with(args, _GRAPHS, first_set(args, "--fp8-param-gather")) if captures_passes(args) else None


def _places_reductions(args: Arguments) -> str | None:
    is_placed = args.ampipe_grad_reduce == "placed" and _captures_stages(args)
    return named_with(args, _GRAPHS, "--ampipe-grad-reduce" if is_placed else None)


def _reduces_with_partners(args: Arguments) -> str | None:
    is_placed = args.ampipe_grad_reduce == "placed" and bool(args.ampipe_partner)
    if not (is_placed and captures_passes(args)):
        return None
    return f"{args.cuda_graph_impl} with --ampipe-partner and --ampipe-grad-reduce placed"


def _has_partner(args: Arguments) -> str | None:
    has_partner = bool(args.ampipe_partner) and _captures_stages(args)
    return named_with(args, _GRAPHS, "--ampipe-partner" if has_partner else None)


MAX_PASSES = 512
"""Forward passes of a step on a rank that can be one chain of graphs, as they are with virtual stages."""


def _has_long_chain(args: Arguments) -> str | None:
    has_stages = args.virtual_pipeline_model_parallel_size or args.num_layers_per_virtual_pipeline_stage
    is_chain = captures_passes(args) and bool(args.ampipe_partner) and bool(has_stages)
    if not is_chain or passes_of_step(args) <= MAX_PASSES:
        return None
    return f"{args.cuda_graph_impl} with --ampipe-partner and --global-batch-size {args.global_batch_size}"


GRAPHS: tuple[Refusal, ...] = (
    Refusal(
        _GRAPHS,
        "a graph of a whole iteration has a fixed number of rows, and experts another one in every pass",
        "Use --cuda-graph-impl local or transformer_engine, of which stages in schedules are captured.",
        lambda args: args.cuda_graph_impl == "full_iteration",
    ),
    Refusal(
        _GRAPHS,
        "what is predicted or tried is without graphs",
        "Name the degree: --ampipe-degree 2, or use --cuda-graph-impl none.",
        _chooses_without_graphs,
    ),
    Refusal(
        _GRAPHS,
        "a graph hands over its gradients when it ends, and not where a reduction is placed",
        "Use --ampipe-grad-reduce stock, or --cuda-graph-impl none.",
        _places_reductions,
    ),
    Refusal(
        _GRAPHS,
        "a graph is a part of one pass",
        "Leave out --ampipe-partner, or use --cuda-graph-impl none.",
        _has_partner,
    ),
    Refusal(
        _GRAPHS,
        "graphs of whole passes are captured for one degree, and none can be tried before",
        "Name the degree: --ampipe-degree 2, or add --ampipe-cluster FILE, which plans without trials.",
        _tries_passes,
    ),
    Refusal(
        _GRAPHS,
        "neither whole passes nor single stages can be captured",
        "Leave out the flag that is named with it, or use --cuda-graph-impl none.",
        _captures_nothing,
    ),
    Refusal(
        _GRAPHS,
        "whole passes are captured with all activations, and a budget may choose to restore some",
        "Use --recompute-granularity, which is captured, without the flag that is named with it; or "
        "--cuda-graph-impl none.",
        _restores_in_stages,
    ),
    Refusal(
        _GRAPHS,
        "a graph of a whole pass reads parameters where they were at its capture, and those in FP8 do not "
        "say where their numbers are",
        "Leave out --fp8-param-gather, or use --cuda-graph-impl none.",
        _gathers_fp8,
    ),
    Refusal(
        _GRAPHS,
        "the passes of two micro-batches are one graph, and the host starts reductions between graphs",
        "Use --ampipe-grad-reduce stock, or leave out --ampipe-partner.",
        _reduces_with_partners,
    ),
    Refusal(
        _GRAPHS,
        f"with virtual pipeline stages each pass of a step is a separate graph, and more than {MAX_PASSES} "
        "forward passes of a rank are too many",
        "Use --cuda-graph-impl none, or a smaller --global-batch-size.",
        _has_long_chain,
    ),
)
"""Refused settings of CUDA graphs."""
