"""Builds a stock Megatron MoE layer and an AMPipe layer with the same weights, and runs both identically."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_expert_data_parallel_group, get_tensor_model_parallel_group
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

# The kernels of tests, by name.
import tests.reference_pieces  # noqa: F401
from megatron_ampipe.block.settings import Settings
from megatron_ampipe.exchange.budgets import FixedRows
from megatron_ampipe.exchange.codecs import load_wire
from megatron_ampipe.launch.host.megatron import HostDotProductAttention, HostLatentProjection
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.documents import DocumentReader
from megatron_ampipe.layers.gates import give_token_ids, load_gate
from megatron_ampipe.layers.layer import AMPipeTransformerLayer, pipelined, with_gate
from megatron_ampipe.layers.process_groups import make_groups_of_model
from megatron_ampipe.runtime.executors import CudaExecutor, Executor, SequentialExecutor, ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.schedule import Exchange, StageKind
from megatron_ampipe.tools.measuring.blocks import Layers
from tests.dist import changed_functions, logged_losses, routing_records
from tests.dist.cases import GRAPH_MODULES, Case
from tests.dist.worker import use_groups
from tests.gated_delta_net_standin import with_gated_delta_net
from tests.late_executor import LateExecutor

EXECUTORS = {
    "sequential": SequentialExecutor, "thread": ThreadExecutor, "cuda": CudaExecutor, "late": LateExecutor,
}  # fmt: skip
HEADS = 4
HIDDEN = 32


def transformer_config(case: Case) -> TransformerConfig:
    """Megatron's configuration of one small fp32 layer."""
    fields: dict[str, Any] = {
        "num_layers": len(case.layers),
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": 64,
        "num_moe_experts": 4,
        "moe_router_topk": 1,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        **case.group_sizes,
        "sequence_parallel": case.parallel.get("tensor_model_parallel_size", 1) > 1,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
    }
    fields |= case.model
    fields["moe_enable_routing_replay"] = case.replay is not None
    # With top-1 routing, a softmax after the selection would always be 1; Megatron requires this.
    fields.setdefault("moe_router_pre_softmax", fields["moe_router_topk"] == 1)
    if fields.get("pipeline_model_parallel_size", 1) > 1:
        fields["pipeline_dtype"] = torch.bfloat16 if fields.get("bf16") else torch.float32
    if fields.get("activation_func") == "silu":
        fields["activation_func"] = torch.nn.functional.silu
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    return kind(**fields)


def build_layers(
    case: Case,
    recorder: Recorder | None = None,
    executor: Executor | None = None,
    reductions: Reductions | None = None,
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A stock layer and an AMPipe layer that loaded its ``state_dict``; ``executor`` replaces the case's.

    Process groups of other sizes than the case's are replaced.
    """
    use_groups(**case.group_sizes)
    # Megatron keeps the losses of as many layers as the first model has.
    logged_losses.clear()
    config = transformer_config(case)
    specs = layer_specs(case, config)
    gate = None if case.router is None else load_gate(case.router)
    if gate is not None:
        specs = [with_gate(spec, gate) for spec in specs]
    # Chosen only after the layers are built, as by --ampipe-exchange auto.
    chooses = case.pipeline.exchange is Exchange.NODES and case.pipeline.overlaps
    first = dataclasses.replace(case.pipeline, exchange=Exchange.ROWS) if chooses else case.pipeline
    context = AMPipeContext(
        Settings(
            exchange="auto" if chooses else "rows",
            wire=case.wire,
            condense=case.condense,
            capacity_scope=case.capacity_scope,
            ranks_per_node=case.ranks_per_node,
        ),
        first,
        recorder=recorder or Recorder(),
        executor=executor or EXECUTORS[case.executor](),
        kernel=case.kernel,
        reductions=reductions,
        documents=DocumentReader(masked=case.masked),
        gate=gate,
        wire=None if case.wire is None else load_wire(case.wire),
        recomputed_layers=case.recompute,
        fixed_rows=FixedRows() if case.fixed_rows else None,
    )
    of_stock = dataclasses.replace(config, **case.stock)
    torch.manual_seed(11)
    # For gated delta nets. A CUDA graph cannot hold the state that Megatron's own tracker sets.
    graph_safe = case.transformer_engine and case.executor == "cuda"
    model_parallel_cuda_manual_seed(11, te_rng_tracker=graph_safe, force_reset_rng=True)
    down = HostLatentProjection if case.whole_down else multi_latent_attention.TELinear
    spec = specs[0] if len(specs) == 1 else TransformerBlockSubmodules(layer_specs=specs)

    def build(spec: Any, config: TransformerConfig) -> torch.nn.Module:
        is_one = isinstance(spec, ModuleSpec)
        return build_module(spec, config=config, layer_number=1) if is_one else Layers(spec, config)

    make_groups_of_model(config, context, None)
    with mock.patch.object(multi_latent_attention, "TELinear", down):
        stock = build(spec, of_stock)
        ours = build(pipelined(spec, context), dataclasses.replace(config))
    context.pipeline = case.pipeline
    # Random values everywhere: biases and norms are initialized to constants, which would hide errors.
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in stock.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            # With a GPU, Megatron makes some parameters there.
            parameter.add_(noise.to(parameter.device))
    ours.load_state_dict(stock.state_dict(), strict=True)
    for layer in getattr(stock, "layers", [stock]):
        if case.wire is not None:
            changed_functions.send_through(layer.mlp, load_wire(case.wire))
        bounds = [chunk.hidden[-1].local_end for chunk in case.pipeline.chunks(case.sequence_length)]
        if case.condense is not None:
            changed_functions.condense(layer.mlp, threshold=case.condense, bounds=bounds)
        if case.capacity_scope == "chunk":
            changed_functions.run_chunk_by_chunk(layer.mlp, bounds)
        if case.padded and config.moe_router_enable_expert_bias and hasattr(layer.mlp, "router"):
            changed_functions.count_without_padding(layer.mlp.router)
    for layer in (stock, ours):
        layer.train(case.training)
        if case.engine in ("linear", "grouped"):
            from tests.te_linear_standin import use_engine

            use_engine(layer, grouped=case.engine == "grouped")
        for parameter in layer.parameters() if config.gradient_accumulation_fusion else ():
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    return stock, ours


def capture(
    layer: torch.nn.Module,
    modules: Collection[str] = GRAPH_MODULES,
    *,
    warm_up: int = 1,
    left_out: Collection[StageKind] = (),
) -> None:
    """Have the stages of AMPipe's layers captured as CUDA graphs, but for those that are left out."""
    for module in layer.modules():
        if isinstance(module, AMPipeTransformerLayer):
            context = module._block.context
            context.graph_modules, context.graph_warm_up = frozenset(modules), warm_up
            context.left_out_of_graphs = frozenset(left_out)


def layer_specs(case: Case, config: TransformerConfig) -> list[ModuleSpec]:
    """Megatron's specification of each layer."""
    make = get_gpt_layer_with_transformer_engine_spec if case.transformer_engine else get_gpt_layer_local_spec
    options = {} if case.transformer_engine else {"normalization": config.normalization}
    specs = []
    for kind in case.layers:
        experts = None if kind == "d" else config.num_moe_experts
        spec = make(
            experts, config.moe_grouped_gemm, config.qk_layernorm, config.multi_latent_attention, **options
        )
        attention = spec.submodules.self_attention.submodules
        if case.whole_down:
            attention.linear_q_down_proj = attention.linear_kv_down_proj = HostLatentProjection
        over_ranks = config.context_parallel_size > 1 and not case.transformer_engine
        if config.multi_latent_attention or case.is_packed or over_ranks:
            # Megatron's module has no argument for the head size of values, takes no packed documents, and
            # knows no context parallelism.
            attention.core_attention = HostDotProductAttention
        specs.append(with_gated_delta_net(spec) if kind == "g" else spec)
    if case.engine in ("grouped", "experts"):
        from tests.te_linear_standin import with_grouped_experts

        specs = [with_grouped_experts(spec) for spec in specs]
    return specs


class Inputs(NamedTuple):
    """The inputs of a pass, on its device."""

    hidden: torch.Tensor
    gradient: torch.Tensor
    rotary: torch.Tensor | None
    mask: torch.Tensor | None = None
    packing: PackedSeqParams | None = None
    padding: torch.Tensor | None = None
    """``[B, S]`` bool."""
    ids: torch.Tensor | None = None


def inputs_of(case: Case, *, rank: int, device: str = "cpu", dtype: torch.dtype) -> Inputs:
    """The inputs of a case: the same for all layers, different for each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    parts = [case.parallel.get(f"{kind}_parallel_size", 1) for kind in ("tensor_model", "context")]
    # Those of a model are the same on its tensor-parallel ranks.
    of_ids = torch.Generator().manual_seed(300 + rank // parts[0])
    ids = torch.randint(255, (case.batch, case.sequence_length // parts[1]), generator=of_ids).to(device)
    num_rows = case.sequence_length // math.prod(parts)
    width = case.model.get("hidden_size", HIDDEN)
    shape = (num_rows, case.batch, width)
    hidden = torch.randn(shape, generator=generator).to(device, dtype)
    gradient = torch.randn(shape, generator=generator) * (0.0 if case.only_losses else 1.0)
    packed = case.is_packed
    packing = packing_of(case, device) if packed else None
    if packed:
        ids = ids.view(1, -1)
        # One sequence after another.
        hidden, gradient = (x.transpose(0, 1).reshape(-1, 1, width) for x in (hidden, gradient))
    positions = case.sequence_length if packing is None else packing.max_seqlen_q
    rotary = (
        RotaryEmbedding(width // HEADS, 1.0, use_cpu_initialization=True)(positions, packed_seq=packed).to(
            device
        )
        if case.rope
        else None
    )
    mask = mask_of(case).to(device) if case.masked else None
    # Another share of the rows of each sequence and rank.
    padding = (torch.rand(shape[1::-1], generator=generator) < 0.3).to(device) if case.padded else None
    return Inputs(hidden, gradient.to(device, dtype), rotary, mask, packing, padding, ids)


def packing_of(case: Case, device: str = "cpu") -> PackedSeqParams:
    """What Megatron passes to the layers for the documents of a case."""
    length, batch = case.sequence_length, case.batch
    starts = [sequence * length + start for sequence in range(batch) for start in case.documents[sequence]]
    bounds = torch.tensor([*starts, batch * length], dtype=torch.int32)
    longest = int(bounds.diff().max())
    bounds = bounds.to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        # One sequence can be without it, as frameworks pack.
        tokens_per_sample=length if batch > 1 else None,
    )


def mask_of(case: Case) -> torch.Tensor:
    """``[B, 1, S, S]``, as ``--reset-attention-mask`` makes it."""
    visible = torch.ones(case.batch, 1, case.sequence_length, case.sequence_length).tril()
    for sequence in range(case.batch):
        for start in case.documents[sequence]:
            visible[sequence, 0, start:, :start] = 0
    return visible < 0.5


def run(
    layer: torch.nn.Module,
    case: Case,
    *,
    rank: int = 0,
    device: str = "cpu",
    seed: int = 17,
    inputs: Inputs | None = None,
) -> dict[str, torch.Tensor]:
    """Run forward and backward; returns everything that the layer computes, by name.

    ``rank`` selects the inputs if they are not given; ``seed`` is of torch's own random numbers.
    """
    if inputs is None:
        inputs = inputs_of(case, rank=rank, device=device, dtype=next(layer.parameters()).dtype)
    logged_losses.zero()
    # Noise that is drawn chunk by chunk on a CPU continues a series.
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    with routing_records.watched(layer, case) as records:
        output, hidden = run_pass(layer, inputs)
    return {**records, "output": output.detach(), "input gradient": hidden.grad, **summed_results(layer)}


def summed_results(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients, buffers and logged losses, by name; of the rows of a rank, summed as Megatron does later.

    Layers that share a schedule hold other rows of the sequence than Megatron's.
    """
    tensor_group, found = get_tensor_model_parallel_group(), {}
    for name, parameter in layer.named_parameters():
        is_fused = getattr(parameter, "grad_added_to_main_grad", False)
        gradient = parameter.main_grad if is_fused else parameter.grad
        gradient = torch.zeros_like(parameter) if gradient is None else gradient.clone()
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradient, group=tensor_group)
        elif tensor_group.size() > 1 and not getattr(parameter, "allreduce", True):
            torch.distributed.all_reduce(gradient, group=get_expert_data_parallel_group())
        found[f"gradient of {name}"] = gradient
    sums = {f"buffer {name}": buffer.clone() for name, buffer in layer.named_buffers()}
    sums |= {f"logged {name}": values for name, values in logged_losses.by_name().items()}
    for values in sums.values():
        torch.distributed.all_reduce(values, group=tensor_group)
    return found | sums


def run_pass(layer: torch.nn.Module, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run forward and backward as in training; returns the output and the input."""
    for parameter in layer.parameters():
        parameter.grad = None
    output, hidden = forward(layer, inputs)
    output.backward(inputs.gradient.to(output.dtype))
    return output, hidden


def forward(layer: torch.nn.Module, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one forward pass; returns the output, and the input that receives a gradient."""
    hidden = inputs.hidden.detach().requires_grad_()
    give_token_ids(layer).keep(inputs.ids)
    output, _ = layer(
        hidden_states=hidden,
        attention_mask=inputs.mask,
        rotary_pos_emb=inputs.rotary,
        packed_seq_params=inputs.packing,
        **({} if inputs.padding is None else {"padding_mask": inputs.padding}),
    )
    return output, hidden


def wrong(
    stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], tolerance: float, **options: float
) -> dict[str, float]:
    """The entries of :func:`differences` that are above a tolerance, or not a number."""
    found = differences(stock, ours, **options)
    return {name: value for name, value in found.items() if not value <= tolerance}


def differences(
    stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], *, of_largest: float = 0.0
) -> dict[str, float]:
    """The maximum difference of each entry, relative to the maximum of the stock entry.

    Of a gradient that is smaller than ``of_largest`` times the largest, relative to that: it is rounding.
    """
    assert stock.keys() == ours.keys(), stock.keys() ^ ours.keys()
    gradients = [value for name, value in stock.items() if name.startswith("gradient")]
    largest = max((value.abs().max().item() for value in gradients), default=0.0)
    found = {}
    for name, expected in stock.items():
        if torch.equal(expected, ours[name]):
            found[name] = 0.0
            continue
        floor = max(1e-12, of_largest * largest if name.startswith("gradient") else 0.0)
        error = (expected - ours[name]).abs().max() / expected.abs().max().clamp_min(floor)
        found[name] = error.item()
    return found
