"""Builds the layers that are compared: Megatron's own, and AMPipe's from the same specification and weights.

All of them use one kernel of :mod:`megatron_ampipe.attention.kernels`, one that runs the same backend for
every shape (``pinned_kernel``): Megatron's layer gets a core attention module that calls it on the whole
sequence, so that no variant has a better kernel. Layers of Transformer Engine use its attention. All
hold the same ``Parameter`` objects.

Experts of local layers are computed one after another, or all of a rank in grouped products: Megatron's
``TEGroupedMLP`` on torch's grouped product, which needs few launches for all experts, as Transformer
Engine's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import KERNELS, pinned_kernel
from megatron_ampipe.block.settings import Settings
from megatron_ampipe.exchange.budgets import FixedRows
from megatron_ampipe.exchange.codecs import load_wire
from megatron_ampipe.layers.context import WHOLE_PASSES, AMPipeContext
from megatron_ampipe.layers.layer import pipelined
from megatron_ampipe.layers.process_groups import make_groups_of_model
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule import Span
from megatron_ampipe.tools.measuring import megatron_graphs
from megatron_ampipe.tools.measuring.bench_job import FIXED, GRAPH_MODULES, Variant
from megatron_ampipe.tools.measuring.grid import Case, model_flags
from megatron_ampipe.tools.measuring.megatron_graphs import LocalGraphs
from megatron_ampipe.tools.measuring.meters import StageTimer
from megatron_ampipe.tools.measuring.ranks import Rank, RankJob

_NUM_SAMPLES, _NUM_HALVINGS = 4096, 20
"""Rows for which :func:`skewing_bias` finds a bias, and its steps."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class KernelAttention(torch.nn.Module):
    """Megatron's core attention, computed by one of AMPipe's kernels on the whole sequence. No parameters."""

    def __init__(self, config: TransformerConfig, *, kernel: str, **_: object) -> None:
        super().__init__()
        self._kernel = KERNELS[kernel]
        self._scale = config.kv_channels**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """``[S, B, H, C]``, ``[S, B, G, C]``, ``[S, B, G, C]`` to ``[S, B, H * C]``, causal."""
        whole = (Span(0, query.shape[0], 0),)
        return self._kernel(query, key, value, spans=whole, scale=self._scale)


class Layers(torch.nn.Module):
    """Consecutive layers, built and called one after another, as Megatron's ``TransformerBlock`` does.

    Attributes:
        timer: Runs stages alone, in layers that :meth:`BlockFactory.build_timed` builds.
        context: What AMPipe's layers share; None in Megatron's.
        local_graphs: Megatron's own graphs of these layers, if they have any.
        graph_bytes: Memory that graphs of these layers hold, where it is known.
    """

    timer: StageTimer
    context: AMPipeContext | None = None
    local_graphs: LocalGraphs | None = None
    graph_bytes: int = 0

    def __init__(self, spec: TransformerBlockSubmodules, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            build_module(layer, config=config, layer_number=number)
            for number, layer in enumerate(spec.layer_specs, 1)
        )

    @property
    def moe_layers(self) -> list[MoELayer]:
        """The MoE layer of each layer that has one."""
        found = [layer.get_submodule("mlp") for layer in self.layers]
        return [layer for layer in found if isinstance(layer, MoELayer)]

    def forward(self, hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, None]:
        """``[S, B, D]`` through all layers to the same shape; arguments as of a layer."""
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states=hidden_states, **kwargs)
        return hidden_states, None


class BlockFactory:
    """Builds the variants of one case on a rank. All weights but those of experts are equal on all ranks.

    Args:
        rank: A rank that has started Megatron.
        case: The block.
        layers: Number of such blocks one after another, each with separate weights.

    Attributes:
        stock: Megatron's own :class:`Layers`.
        kernel: The attention kernel of all variants.
        fused_gradients: Whether linear layers add their weights' gradients to ``main_grad`` themselves.
    """

    def __init__[Job: RankJob](self, rank: Rank[Job], case: Case, *, layers: int = 1) -> None:
        job, self._on_cuda = rank.job, rank.job.on_cuda
        self._ranks_per_node, self._link = job.ranks_per_node, job.link
        self._config = _transformer_config(
            case, layers=layers, num_ranks=job.num_ranks, on_cuda=self._on_cuda
        )
        if case.local:
            self.kernel = pinned_kernel(
                on_gpu=self._on_cuda, dtype=DTYPES[case.dtype], head_size=self._config.kv_channels
            )
            spec = get_gpt_layer_local_spec(case.experts, False, normalization=self._config.normalization)
            if case.grouped:
                _use_grouped_experts(spec)
            attention = spec.submodules.self_attention.submodules
            attention.core_attention = ModuleSpec(module=KernelAttention, params={"kernel": self.kernel})
        else:
            self.kernel = "te"
            spec = get_gpt_layer_with_transformer_engine_spec(case.experts, True)
        self._spec = TransformerBlockSubmodules(layer_specs=[spec] * layers)
        torch.manual_seed(job.seed)
        self.stock = self._build(self._spec)
        # If the experts of all ranks were equal, a token at the wrong expert would not be noticed.
        torch.manual_seed(job.seed * 10_007 + rank.number)
        with torch.no_grad():
            for layer in self.stock.moe_layers:
                for parameter in layer.experts.parameters():
                    parameter.normal_(std=self._config.init_method_std)
        if case.imbalance > 1:
            for layer in self.stock.moe_layers:
                weight, topk = layer.router.weight, case.topk
                bias = skewing_bias(weight, topk=topk, num_ranks=job.num_ranks, imbalance=case.imbalance)
                layer.router.expert_bias.copy_(bias)
        self.fused_gradients = self._config.gradient_accumulation_fusion
        if self.fused_gradients:
            # As in training, linear layers add their weights' gradients to these.
            for parameter in self.stock.parameters():
                main_grad = torch.zeros_like(parameter, dtype=torch.float32)
                parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def build(
        self, variant: Variant, *, recorder: Recorder | None = None, executor: Executor | None = None
    ) -> Layers:
        """The variant as a user would get it, with the parameters of the stock layers.

        ``recorder`` records every stage; ``executor`` replaces the default executor.
        """
        context = AMPipeContext(
            Settings(wire=variant.wire, ranks_per_node=self._ranks_per_node),
            variant.pipeline,
            recorder=recorder or Recorder(),
            executor=executor,
            kernel=self.kernel,
            wire=None if variant.wire is None else load_wire(variant.wire),
            fixed_rows=FixedRows() if variant.rows == FIXED else None,
            graph_modules=_graph_modules(variant),
            graph_warm_up=1,
        )
        make_groups_of_model(self._config, context, None)
        layers = self._with_stock_parameters(self._build(pipelined(self._spec, context)))
        layers.context = context
        return layers

    def build_megatron(self, **fields: object) -> Layers:
        """Megatron's own layers with other fields of its configuration, and the stock layers' parameters."""
        return self._with_stock_parameters(self._build(self._spec, **fields))

    def build_with_graphs(self) -> Layers:
        """Likewise, attention and experts as separate layers, with Megatron's own graphs of parts of them."""
        specs = [part for layer in self._spec.layer_specs for part in megatron_graphs.divided(layer)]
        spec = TransformerBlockSubmodules(layer_specs=specs)
        # Megatron changes the current stream for good.
        with torch.cuda.stream(torch.cuda.current_stream()):
            built = self._build(spec, **megatron_graphs.fields(GRAPH_MODULES))
        layers = self._with_stock_parameters(built, name_of=megatron_graphs.divided_name)
        layers.local_graphs = LocalGraphs(layers)
        return layers

    def build_timed(self, variant: Variant, *, num_passes: int, saved_bytes: int = 0) -> Layers:
        """The same layers, their stages run alone and recorded; see :class:`.StageTimer`."""
        has_two_classes = self._link.within_node_bit_per_s is not None
        timer = StageTimer(
            Recorder(num_iterations=num_passes),
            saved_bytes=saved_bytes,
            ranks_per_node=self._ranks_per_node if has_two_classes else None,
        )
        layers = self.build(variant, recorder=timer.recorder, executor=timer)
        layers.timer = timer
        return layers

    def _with_stock_parameters(self, layers: Layers, *, name_of: Callable[[str], str] = str) -> Layers:
        """``name_of`` gives the name of one of the stock layers' tensors in these layers."""
        state = self.stock.state_dict(keep_vars=True)
        layers.load_state_dict({name_of(name): value for name, value in state.items()}, assign=True)
        shared = {name_of(name): parameter for name, parameter in self.stock.named_parameters()}
        assert all(parameter is shared[name] for name, parameter in layers.named_parameters())
        return layers

    def _build(self, spec: TransformerBlockSubmodules, **fields: object) -> Layers:
        layers = Layers(spec, dataclasses.replace(self._config, **fields))
        layers.train()
        return layers.cuda() if self._on_cuda else layers


def _graph_modules(variant: Variant) -> frozenset[str]:
    if not variant.graphs:
        return frozenset()
    return WHOLE_PASSES if variant.rows == FIXED else GRAPH_MODULES


@torch.no_grad()
def skewing_bias(weight: Tensor, *, topk: int, num_ranks: int, imbalance: float) -> Tensor:
    """A bias of sigmoid scores with which rank 0 gets so many times the mean number of rows.

    It is found for normally distributed rows, the same on all ranks, so that a layer's own rows come close.

    Args:
        weight: ``[experts, hidden]``, of the router.
        topk: Experts of a token.
        num_ranks: Ranks that share the experts.
        imbalance: At least 1.

    Returns:
        ``[experts]``: 0, or the same number for all experts of rank 0.
    """
    experts = weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_NUM_SAMPLES, weight.shape[1], generator=generator)
    scores = torch.sigmoid(rows @ weight.float().cpu().T)
    low, high = 0.0, 1.0
    bias = torch.zeros(experts)
    # Each step halves the range in which the bias is.
    for _ in range(_NUM_HALVINGS):
        bias[: experts // num_ranks] = (low + high) / 2
        chosen = (scores + bias).topk(topk, dim=-1).indices
        share = float((chosen < experts // num_ranks).float().mean())
        if share * num_ranks < imbalance:
            low = (low + high) / 2
        else:
            high = (low + high) / 2
    return bias.to(weight.device)


def _transformer_config(case: Case, *, layers: int, num_ranks: int, on_cuda: bool) -> TransformerConfig:
    """Megatron's configuration of the layers, without fusions that need extras."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    flags = {flag.replace("-", "_"): value for flag, value in model_flags(case, num_ranks=num_ranks).items()}
    fields = {name: value for name, value in flags.items() if name in known}
    if case.activation == "swiglu":
        fields |= {"gated_linear_unit": True, "activation_func": F.silu}
    return TransformerConfig(
        num_layers=layers,
        num_moe_experts=case.experts,
        moe_aux_loss_coeff=0.0,
        moe_grouped_gemm=case.grouped,
        moe_permute_fusion=not case.local,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=not case.local or compat.has_fused_weight_gradients(on_gpu=on_cuda),
        persist_layer_norm=False,
        use_cpu_initialization=not on_cuda,
        params_dtype=DTYPES[case.dtype],
        **fields,
    )


def _use_grouped_experts(spec: ModuleSpec) -> None:
    """Have a layer's specification compute all experts of a rank in one product."""
    linear = TorchGroupedLinear
    submodules = GroupedMLPSubmodules(linear_fc1=linear, linear_fc2=linear, activation_func=None)
    experts = partial(TEGroupedMLP, submodules=submodules)
    moe = dataclasses.replace(compat.moe_submodules(spec.submodules.mlp), experts=experts)
    spec.submodules.mlp = compat.with_moe_submodules(spec.submodules.mlp, moe)


class TorchGroupedLinear(torch.nn.Module):
    """A linear layer of all local experts in one product; replaces Transformer Engine's."""

    def __init__(
        self,
        num_experts: int,
        num_inputs: int,
        num_outputs: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        **_: object,
    ) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.empty(num_experts, num_outputs, num_inputs, dtype=config.params_dtype, device=device)
        init_method(weight)
        self.weight = torch.nn.Parameter(weight)

    def forward(self, tokens: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        """``[T, inputs]``, sorted by expert, to ``[T, outputs]``; and no bias."""
        ends = torch.tensor(tokens_per_expert, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        if tokens.is_cuda:
            # From pinned memory, or the host would wait.
            ends = ends.pin_memory().to(tokens.device, non_blocking=True)
        output = F.grouped_mm(tokens, self.weight.transpose(1, 2), offs=ends)
        if output.requires_grad:
            # The product's backward takes no expanded gradient.
            output.register_hook(Tensor.contiguous)
        return output, None

    def backward_dw(self) -> None:
        """Does nothing: weight gradients are computed with the other gradients."""
