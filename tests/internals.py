"""Every name of Megatron that AMPipe builds on: where it is used, what for, and what we rely on.

``python -m tests.internals > docs/internals.md`` writes the page; ``tests/megatron/test_megatron_names.py``
checks the facts against the installed Megatron, and that every import of the package is listed.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.internals_seen import recorded, versions_with

Definition = ast.FunctionDef | ast.ClassDef
Fact = Callable[["Subject"], Iterator[str]]
"""Yields what is not as we rely on it, one clause each."""


@dataclass(frozen=True, slots=True)
class Internal:
    """One name of Megatron.

    Attributes:
        name: Dotted, without ``megatron.``.
        used_in: Files and folders of ``megatron_ampipe`` that depend on it, separated by spaces.
        used_for: What it is used for.
        if_changed: What goes wrong if it changes.
        facts: What we rely on, in addition to its being there.
    """

    name: str
    used_in: str
    used_for: str
    if_changed: str
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class Subject:
    """A name of Megatron, imported, and the source that defines it."""

    value: Any
    source: Definition | None

    @classmethod
    def of(cls, name: str) -> Subject:
        value, owner, attribute = resolve(name)
        if inspect.ismodule(value):
            return cls(value, None)
        for module in (owner, sys.modules[getattr(value, "__module__", owner.__name__)]):
            found = next((node for node in definitions(module) if node.name == attribute), None)
            if found is not None:
                return cls(value, found)
        return cls(value, None)

    def function(self, method: str | None) -> ast.FunctionDef | None:
        """The definition itself, or one of its methods."""
        if method is None:
            return self.source if isinstance(self.source, ast.FunctionDef) else None
        body = self.source.body if isinstance(self.source, ast.ClassDef) else []
        return next(
            (node for node in body if isinstance(node, ast.FunctionDef) and node.name == method), None
        )


def resolve(name: str) -> tuple[Any, ModuleType, str]:
    """Import ``megatron.<name>``: the object, the module that was asked for it, and its own name."""
    try:
        module = importlib.import_module(f"megatron.{name}")
        return module, module, ""
    except ModuleNotFoundError:
        owner, _, attribute = f"megatron.{name}".rpartition(".")
        module = importlib.import_module(owner)
        return getattr(module, attribute), module, attribute


@cache
def definitions(module: ModuleType) -> list[Definition]:
    """Functions and classes of a module, read from its file: the host platform replaces some of them."""
    tree = ast.parse(inspect.getsource(module))
    return [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def takes(*parameters: str, method: str | None = None) -> Fact:
    """It can be given these parameters by name."""

    def fact(subject: Subject) -> Iterator[str]:
        function = subject.function(method)
        if function is None:
            yield f"{method or 'it'} is not defined as a function any more"
            return
        arguments = function.args
        known = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        for parameter in parameters:
            if parameter not in known:
                yield f"{function.name} takes no {parameter!r} any more, only {', '.join(known)}"

    return fact


def begins_with(*parameters: str, method: str | None = None) -> Fact:
    """Its positional parameters begin with these, in this order."""

    def fact(subject: Subject) -> Iterator[str]:
        function = subject.function(method)
        found = [each.arg for each in function.args.args if each.arg != "self"] if function else []
        if tuple(found[: len(parameters)]) != parameters:
            yield f"{method or 'it'} begins with ({', '.join(found)}) instead of ({', '.join(parameters)})"

    return fact


def says(*fragments: str, method: str | tuple[str, ...] | None = None) -> Fact:
    """Its source, white space aside, contains these; of several methods, each in one of them."""
    methods = (method,) if isinstance(method, str) else method

    def fact(subject: Subject) -> Iterator[str]:
        nodes = [subject.source] if methods is None else [subject.function(name) for name in methods]
        text = squeezed("".join(ast.unparse(node) for node in nodes if node is not None))
        where = " and ".join(methods or ["it"])
        for fragment in fragments:
            if squeezed(fragment) not in text:
                yield f"the source of {where} does not contain {fragment!r} any more"

    return fact


def has(*attributes: str) -> Fact:
    """It has these attributes: methods, members of an enum, names of a module."""

    def fact(subject: Subject) -> Iterator[str]:
        for attribute in attributes:
            if not hasattr(subject.value, attribute):
                yield f"it has no {attribute!r} any more"

    return fact


def sets(*attributes: str) -> Fact:
    """Its methods, or those of a class it inherits from, give ``self`` these attributes."""

    def fact(subject: Subject) -> Iterator[str]:
        classes = [each for each in subject.value.__mro__ if each.__module__.startswith("megatron.core")]
        text = "\n".join(inspect.getsource(each) for each in classes)
        for attribute in attributes:
            if not re.search(rf"\bself\.{attribute}\s*(:[^=\n]+)?=[^=]", text):
                yield f"it does not set self.{attribute} any more"

    return fact


def fields(*names: str) -> Fact:
    """It is a dataclass with these fields."""

    def fact(subject: Subject) -> Iterator[str]:
        found = {field.name for field in dataclasses.fields(subject.value)}
        for name in names:
            if name not in found:
                yield f"it has no field {name!r} any more"

    return fact


def behaves(check: Callable[[Any], bool]) -> Fact:
    """It does what the docstring of ``check`` says."""

    def fact(subject: Subject) -> Iterator[str]:
        if not check(subject.value):
            yield f"it does not do this any more: {inspect.cleandoc(check.__doc__ or '')}"

    return fact


def squeezed(text: str) -> str:
    """Without white space, and with one kind of quotation mark."""
    return re.sub(r"\s+", "", text).replace('"', "'")


def _adds_its_gradient_whatever_comes_in(scaler: Any) -> bool:
    """An incoming gradient of zero still lets the gradient of the loss through."""
    import torch

    scores = torch.ones(3, requires_grad=True)
    scaler.apply(scores, (scores * 2).sum()).backward(torch.zeros(3))
    return bool((scores.grad == 2).all())


def _rounds_capacity_up(get_capacity: Any) -> bool:
    """32 choices of 4 experts at factor 0.6 give ceil(32 / 4 * 0.6) = 5 tokens per expert."""
    return bool(get_capacity(num_tokens=32, num_experts=4, capacity_factor=0.6) == 5)


def _drops_by_position_as_the_ledger_does(drop: Any) -> bool:
    """Position dropping keeps the tokens that a Capacity keeps over two chunks."""
    import torch

    from megatron_ampipe.layers.block_routing import Capacity

    scores = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).softmax(dim=1)
    routing_map = torch.zeros(64, 4, dtype=torch.bool).scatter(1, scores.topk(2, dim=1).indices, True)
    probs = scores * routing_map
    _, expected = drop(
        probs, routing_map, router_topk=2, capacity_factor=0.5, drop_policy="position", pad_to_capacity=False
    )
    config = SimpleNamespace(
        moe_token_drop_policy="position", moe_expert_capacity_factor=0.5, num_moe_experts=4
    )
    ledger = Capacity(config, topk=2, num_tokens=64)
    found = [ledger.keep(probs[part], routing_map[part]) for part in (slice(0, 20), slice(20, 64))]
    return torch.equal(expected, torch.cat(found))


def _marks_the_first_forward_ever(module: Any) -> bool:
    """Each linear layer has is_first_microbatch, True when it is built, passed on, False after a forward."""
    text = squeezed(inspect.getsource(module))
    built, after = (text.count(f"self.is_first_microbatch={value}") for value in (True, False))
    return built == after == text.count("is_first_microbatch=_is_first_microbatch") > 0


def _gives_a_window_only_where_one_is_set(is_window: Any) -> bool:
    """True with a window and no skipped layers, False without a window."""
    return bool(is_window((5, 0), None, 1)) and not is_window(None, None, 1)


def _forks_a_named_state(get_tracker: Any) -> bool:
    """The tracker has fork(), get_states() and set_states()."""
    return all(hasattr(get_tracker(), name) for name in ("fork", "get_states", "set_states"))


def _adds_weight_gradients_by_the_kernel(module: Any) -> bool:
    """A linear layer with fusion adds its weight's gradient to main_grad by wgrad_gemm_accum_fp32."""
    import torch

    weight = torch.nn.Parameter(torch.randn(3, 2))
    weight.main_grad = torch.ones(3, 2)
    rows = torch.randn(5, 2)
    output = module.linear_with_grad_accumulation_and_async_allreduce(
        rows, weight, None, True, allreduce_dgrad=False, sequence_parallel=False, tp_group=None
    )
    output.sum().backward()
    return weight.grad is None and torch.allclose(weight.main_grad, 1 + rows.sum(0).expand(3, 2))


STEPS = (
    "dispatch_preprocess",
    "dispatch_postprocess",
    "combine_preprocess",
    "combine_postprocess",
)

INTERNALS = [
    # The block.
    Internal(
        "core.transformer.transformer_layer.TransformerLayer",
        "layers/layer.py layers/block_stack.py layers/block_modules.py layers/hybrid.py "
        "layers/attention_stages.py layers/moe_stages.py "
        "launch/host/hybrid_layers.py",
        (
            "subclassed; its modules are called stage by stage, as `_forward_attention` and "
            "`_forward_mlp` call them"
        ),
        "stages compute something else than the stock layer, or a module is left out",
        (
            sets("input_layernorm", "self_attention", "self_attn_bda", "pre_mlp_layernorm", "mlp", "mlp_bda"),
            sets("hidden_dropout", "is_moe_layer", "layer_number", "pg_collection"),
            takes("hidden_states", "attention_mask", "context", "context_mask", method="_forward_attention"),
            takes("rotary_pos_emb", "inference_context", method="_forward_attention"),
            says("self._forward_attention(", "self._forward_mlp(", method="forward"),
            says(
                "self.self_attn_bda(self.training, self.config.bias_dropout_fusion)"
                "(attention_output_with_bias, residual, self.hidden_dropout)",
                method=("_forward_attention", "_apply_self_attn_bda_step"),
            ),
            says("residual = residual.float()", method=("_forward_attention", "_run_input_layernorm")),
            says("residual = residual.float()", method=("_forward_mlp", "_pre_mlp_layernorm_and_residual")),
            says(
                "self.mlp_bda(self.training, self.config.bias_dropout_fusion)"
                "(mlp_output_with_bias, residual, self.hidden_dropout)",
                method=("_forward_post_mlp", "_apply_mlp_bda_step"),
            ),
        ),
    ),
    Internal(
        "core.transformer.attention.Attention",
        "layers/chunk_attention.py layers/attention_stages.py",
        "`forward` is mirrored around core attention",
        "rotary embedding, scale or projection differ from stock",
        (
            sets("core_attention", "linear_proj", "layer_number", "pg_collection"),
            sets("hidden_size_per_attention_head", "checkpoint_core_attention"),
            says(
                "(self.linear_proj)(core_attn_out)",
                "output_gate=self.config.attention_output_gate",
                "self._apply_output_gate(core_attn_out, gate)",
                method="forward",
            ),
            begins_with("x", "gate", method="_apply_output_gate"),
        ),
    ),
    Internal(
        "core.models.common.embeddings.yarn_rotary_pos_embedding._yarn_get_concentration_factor_from_config",
        "compat.py",
        "the scale of rotated queries and keys, which only 0.19 keeps on the layer",
        "YaRN models differ from stock",
        (begins_with("config"),),
    ),
    Internal(
        "core.transformer.attention.SelfAttention",
        "layers/chunk_attention.py layers/block_modules.py layers/layer.py",
        "`get_query_key_value_tensors` is the `qkv` stage, and `linear_qkv` gathers in it; only this class "
        "is pipelined",
        "queries, keys or values are something else",
        (
            sets("linear_qkv"),
            begins_with("hidden_states", "key_value_states", method="get_query_key_value_tensors"),
            says("return (query, key, value)", method="get_query_key_value_tensors"),
            says("return (query, key, value, gate)", method="get_query_key_value_tensors"),
        ),
    ),
    Internal(
        "core.transformer.multi_latent_attention.MultiLatentAttention",
        "layers/chunk_attention.py layers/block_modules.py",
        "recognised; its scale is read, its recompute of the up-projection taken over",
        "wrong scale, or a checkpoint that refuses `autograd.grad`",
        (sets("softmax_scale", "recompute_up_proj", "linear_proj", "core_attention"),),
    ),
    Internal(
        "core.transformer.multi_latent_attention.MLASelfAttention",
        "layers/layer.py",
        "as `SelfAttention`, for latent attention",
        "queries, keys or values are something else",
        (
            begins_with("hidden_states", method="get_query_key_value_tensors"),
            says(
                "return (query, key, value, q_compressed, kv_compressed)",
                method="get_query_key_value_tensors",
            ),
        ),
    ),
    Internal(
        "core.transformer.dot_product_attention.DotProductAttention",
        "layers/chunk_attention.py launch/host/core_attention.py",
        (
            "tells a local layer from one of Transformer Engine; scale and dropout are read; the "
            "host platform subclasses it"
        ),
        "wrong kernel or scale; dropout drawn from another random state",
        (
            sets("softmax_scale", "attention_dropout", "layer_number", "config", "pg_collection"),
            begins_with("query", "key", "value", "attention_mask", method="forward"),
            says("if not self.config.sequence_parallel:", "get_cuda_rng_tracker().fork()", method="forward"),
            says("config.context_parallel_size == 1", method="__init__"),
            takes("softmax_scale", "pg_collection", method="__init__"),
            says("self.softmax_offset", method="forward"),
        ),
    ),
    Internal(
        "core.transformer.enums.AttnMaskType",
        "layers/chunk_attention.py",
        "`causal_bottom_right` for Transformer Engine",
        "chunks after the first see the wrong keys",
        (has("causal_bottom_right"),),
    ),
    Internal(
        "core.transformer.utils.is_layer_window_attention",
        "layers/chunk_attention.py launch/host/core_attention.py",
        "which layers have a sliding window",
        "a window in the wrong layers",
        (
            begins_with("window_size", "window_attn_skip_freq", "layer_number"),
            behaves(_gives_a_window_only_where_one_is_set),
        ),
    ),
    Internal(
        "core.models.common.embeddings.rope_utils.apply_rotary_pos_emb",
        "layers/chunk_attention.py",
        "rotary embedding of queries and keys",
        "positions differ from stock",
        (begins_with("t", "freqs"), takes("config", "mscale", "cp_group")),
    ),
    Internal(
        "core.tensor_parallel.mappings.gather_from_sequence_parallel_region",
        "layers/chunk_attention.py layers/linear_layers.py",
        "gathers keys and values over context-parallel ranks, and rows of linear layers over tensor-parallel "
        "ones, gradients summed back",
        "context parallelism and `--ampipe-schedule lancet` lose gradients",
        (begins_with("input_", "tensor_parallel_output_grad"), takes("group", "output_split_sizes")),
    ),
    Internal(
        "core.tensor_parallel.get_cuda_rng_tracker",
        "layers/chunk_attention.py layers/recompute.py",
        "dropout of attention in the named random state; states kept for recompute",
        "dropout masks shared between ranks, or another mask in recompute",
        (behaves(_forks_a_named_state),),
    ),
    Internal(
        "core.tensor_parallel.layers.ColumnParallelLinear",
        "layers/linear_layers.py layers/block_modules.py launch/host/hybrid_layers.py",
        "calls its method `_forward_impl` by keywords, which is replaced while weight gradients wait; leaves "
        "its all-gather to the caller while `explicit_expert_comm` is set; a module of the local layers of "
        "hybrid models",
        "`--ampipe-schedule lancet` fails at the first pass, and hybrid models on a CPU host; rows of "
        "tensor-parallel attention are gathered twice",
        (
            says("self._forward_impl(", "input=input_parallel", method="forward"),
            says(
                "or self.explicit_expert_comm",
                "sequence_parallel=False if self.explicit_expert_comm else self.sequence_parallel",
                "allreduce_dgrad = False if self.explicit_expert_comm else self.allreduce_dgrad",
                method="forward",
            ),
        ),
    ),
    Internal(
        "core.tensor_parallel.layers.RowParallelLinear",
        "layers/linear_layers.py layers/block_modules.py launch/host/hybrid_layers.py",
        "the same; and leaves its reduce-scatter, and its bias, to the caller while `explicit_expert_comm` "
        "is set",
        "the same; and rows of tensor-parallel attention are scattered twice, or their bias is added several "
        "times",
        (
            says("self._forward_impl(", "input=input_parallel", method="forward"),
            says("if self.explicit_expert_comm:", "output_ = output_parallel", method="forward"),
            sets("sequence_parallel", "skip_bias_add", "tp_group", "explicit_expert_comm", "bias"),
        ),
    ),
    Internal(
        "core.tensor_parallel.layers.linear_with_frozen_weight",
        "layers/linear_layers.py",
        "computes the gradient of the input alone",
        "`--ampipe-schedule lancet` computes other gradients",
        (
            takes(
                "input",
                "weight",
                "bias",
                "gradient_accumulation_fusion",
                "allreduce_dgrad",
                "sequence_parallel",
                "tp_group",
            ),
        ),
    ),
    Internal(
        "core.tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication",
        "runtime/segment.py layers/linear_layers.py",
        "marks a weight whose gradient it has added to `main_grad`; that product is mirrored",
        "weight gradients counted twice or not at all under gradient accumulation fusion",
        (says("weight.grad_added_to_main_grad = True", method="backward"),),
    ),
    Internal(
        "core.distributed.distributed_data_parallel.DistributedDataParallel",
        "layers/attention_stages.py layers/moe_stages.py layers/router.py layers/block_modules.py "
        "layers/block_stack.py launch/grad_reduce.py launch/attach.py",
        (
            "waits for a module's own parameters in a forward pre-hook of every module; zeroes "
            "`main_grad` before every iteration; has the bucket groups that reduce gradients; its "
            "constructor, which keeps the accumulation nodes, is wrapped while a run lasts"
        ),
        "stale weights under `--overlap-param-gather`; first gradients added to old ones; every gradient of "
        "every chunk crosses to another stream",
        (
            says("param.expand_as(param)", "self.grad_accs.append(grad_acc)", method="__init__"),
            says(
                "for param in module.parameters(recurse=False):",
                "self.param_to_bucket_group[param]",
                method="_make_forward_pre_hook",
            ),
            says(
                "finish_param_sync(skip_next_bucket_dispatch=",
                method=("_make_forward_pre_hook", "_finish_param_sync_for_bucket_group"),
            ),
            says("for module in self.module.modules():", method="enable_forward_pre_hook"),
            says("buffer.reset()", method="zero_grad_buffer"),
            sets("bucket_groups", "expert_parallel_bucket_groups"),
        ),
    ),
    Internal(
        "core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup",
        "layers/attention_stages.py layers/moe_stages.py launch/grad_reduce.py",
        (
            "gathers a bucket of parameters once per iteration, however often it is asked to; its "
            "`start_grad_sync` and `finish_grad_sync` are wrapped for `--ampipe-grad-reduce placed`"
        ),
        "every chunk gathers the parameters again; reductions are not placed, or waited for twice",
        (
            sets("grad_reduce_handle"),
            says("self.start_grad_sync(", method="register_grad_ready"),
            says(
                "self.start_grad_sync(force_all_reduce=force_all_reduce)",
                "self.grad_reduce_handle.wait()",
                method="finish_grad_sync",
            ),
            says(
                "if not self.param_gather_dispatched: self.start_param_sync()",
                "if self.param_gather_handle is not None: self.param_gather_handle.wait()",
                "self.param_gather_handle = None",
                method="finish_param_sync",
            ),
            says("self.param_gather_dispatched = False", method="finish_grad_sync"),
        ),
    ),
    Internal(
        "core.transformer.module.MegatronModule",
        "layers/block_modules.py launch/refusals.py",
        ("marks the first micro-batch of every iteration for quantized layers alone, which are refused"),
        "weights of quantized layers are not updated",
        (
            says(
                "if self.config.fp8 is not None or self.config.fp4 is not None "
                "or getattr(self.config, 'use_kitchen', False) "
                "or (getattr(self.config, 'quant_recipe', None) is not None):",
                "m.is_first_microbatch = True",
                method="set_is_first_microbatch",
            ),
        ),
    ),
    Internal(
        "core.extensions.transformer_engine",
        "layers/block_modules.py",
        "its linear layers mark their first forward ever as the first micro-batch",
        (
            "with gradient accumulation fusion, the first iteration loses the gradients of all "
            "chunks but the first"
        ),
        (behaves(_marks_the_first_forward_ever),),
    ),
    Internal(
        "core.tensor_parallel.layers",
        "launch/host/megatron.py layers/linear_layers.py",
        "given a CPU kernel for gradient accumulation fusion, and told that it exists; the kernel is called",
        "the benchmark cannot fuse on a CPU, and its chunks sum weight gradients",
        (
            has("_grad_accum_fusion_available", "fused_weight_gradient_mlp_cuda"),
            behaves(_adds_weight_gradients_by_the_kernel),
        ),
    ),
    Internal(
        "core.transformer.moe.moe_layer.MoELayer",
        "layers/layer.py layers/block_modules.py layers/hybrid.py layers/moe_stages.py",
        "router, experts and shared experts are taken from it; `forward` is mirrored",
        "stages miss a step of the MoE layer",
        (
            sets("router", "experts", "shared_experts", "num_local_experts", "local_expert_indices"),
            takes("submodules", method="__init__"),
            says(
                "self.token_dispatcher.dispatch_postprocess(hidden_states, probs)",
                "(dispatched_input, tokens_per_expert, permuted_probs",
                "self.token_dispatcher.combine_preprocess(expert_output)",
                method="routed_experts_compute",
            ),
            says("output = output + shared_expert_output", method="postprocess"),
        ),
    ),
    Internal(
        "core.transformer.moe.moe_layer.BaseMoELayer",
        "compat.py",
        "tells an MoE layer, of whatever class, from a dense one",
        "MoE layers are not recognised and stay stock",
    ),
    Internal(
        "core.models.gpt.moe_module_specs.get_moe_module_spec_for_backend",
        "compat.py layers/layer.py tools/measuring",
        (
            "an MoE layer is recognised as `partial(MoELayer, submodules=...)`, or a `ModuleSpec` of "
            "it (0.17); gives Transformer Engine's grouped experts"
        ),
        "MoE layers are not recognised and stay stock",
        (says("return partial(MoELayer, submodules=MoESubmodules("),),
    ),
    Internal(
        "core.transformer.moe.token_dispatcher.MoETokenDispatcher",
        "exchange/packing.py",
        "which ranks exchange tokens",
        "tokens go to other ranks than in the stock layer",
        (
            says(
                "self.ep_group = pg_collection.ep",
                "self.tp_group = pg_collection.expt_tp",
                "self.tp_ep_group = pg_collection.tp_ep",
                method="__init__",
            ),
        ),
    ),
    Internal(
        "core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher",
        "exchange/packing.py",
        (
            "mirrored with its permutations: `preprocess` is cut where it would wait for counts, AMPipe "
            "calls the collectives"
        ),
        "wrong split sizes or order of rows: a crash or mixed-up tokens",
        (
            has(*STEPS),
            begins_with("hidden_states", "routing_map", "probs", method="dispatch_preprocess"),
            says(
                "input_chunk_idxs.reshape(-1, self.num_local_experts).T.ravel()",
                "input_chunk_idxs.reshape(self.num_local_experts, -1).T.ravel()",
                method="__init__",
            ),
            says(
                "permute(hidden_states, self.routing_map, probs=probs, num_out_tokens=self.num_out_tokens, "
                "fused=self.config.moe_permute_fusion",
                method="dispatch_preprocess",
            ),
            says(
                ".reshape(self.ep_size, self.tp_size, self.num_experts).transpose(0, 1)",
                "self.output_splits = num_global_tokens_per_rank[self.tp_rank]",
                "group=self.tp_ep_group",
                method="preprocess",
            ),
            says(
                "all_to_all(self.ep_group, permutated_local_input_tokens, self.output_splits, "
                "self.input_splits",
                "all_to_all(self.ep_group, permuted_probs, self.output_splits, self.input_splits",
                method="token_dispatch",
            ),
            says(
                "all_to_all(self.ep_group, hidden_states, self.input_splits, self.output_splits",
                method="token_combine",
            ),
            says(
                "self.output_splits_tp.tolist()",
                "gather_from_sequence_parallel_region(global_input_tokens, group=self.tp_group",
                "sort_chunks_by_idxs(global_input_tokens, self.num_global_tokens_per_local_expert.ravel(), "
                "self.sort_input_by_local_experts, probs=global_probs",
                method="dispatch_postprocess",
            ),
            says(
                "sort_chunks_by_idxs(hidden_states, self.num_global_tokens_per_local_expert.T.ravel(), "
                "self.restore_output_by_local_experts",
                "reduce_scatter_to_sequence_parallel_region(hidden_states.to(self.probs.dtype)",
                method="combine_preprocess",
            ),
            says(
                "self.reversed_local_input_permutation_mapping",
                "restore_shape=self.hidden_shape_before_permute",
                "output.view(self.hidden_shape)",
                method="combine_postprocess",
            ),
        ),
    ),
    Internal(
        "core.transformer.moe.token_dispatcher.MoEAllGatherTokenDispatcher",
        "exchange/packing.py",
        "mirrored likewise",
        "mixed-up tokens",
        (
            has(*STEPS),
            says("self.routing_map", "self.tp_ep_group", method="token_dispatch"),
            says("hidden_states.to(self.local_probs.dtype), group=self.tp_ep_group", method="token_combine"),
        ),
    ),
    Internal(
        "core.transformer.moe.token_dispatcher.MoEFlexTokenDispatcher",
        "exchange/flex.py",
        "subclassed, for DeepEP and HybridEP: AMPipe makes the calls that send tokens",
        "mixed-up tokens",
        (
            begins_with("num_local_experts", "local_expert_indices", method="__init__"),
            has(*STEPS),
            says("self._comm_manager.setup_metadata", method="dispatch_preprocess"),
            says("get_permuted_hidden_states_by_experts", method="dispatch_postprocess"),
        ),
    ),
    Internal(
        "core.transformer.moe.token_dispatcher._DeepepManager",
        "exchange/flex.py",
        "its permutations, with another `_indices_to_multihot`; a chunk sets what its dispatch would",
        "mixed-up tokens",
        (
            sets("token_indices", "token_probs", "handle", "group", "num_experts"),
            takes("indices", "probs", method="_indices_to_multihot"),
            says(
                "self.dispatched_indices",
                "self.dispatched_probs",
                "self.tokens_per_expert",
                method="dispatch",
            ),
        ),
    ),
    Internal(
        "core.transformer.moe.token_dispatcher._HybridEPManager",
        "exchange/flex.py",
        "its `dispatch` makes the first call of a chunk; the other calls are given its handle",
        "mixed-up tokens",
        (
            sets("routing_map", "token_probs", "handle", "pad_multiple", "drop_and_pad", "tokens_per_expert"),
            says(
                "self.dispatched_probs",
                "self.tokens_per_expert=tokens_per_expert.to(torch.int64)",
                "self.handle",
                "fused=self.config.moe_permute_fusion_into_hybridep",
                method="dispatch",
            ),
        ),
    ),
    Internal(
        "core.transformer.moe.fused_a2a",
        "exchange/flex.py",
        "the buffers of DeepEP and HybridEP",
        "a training step with the flex dispatcher fails",
        (has("get_buffer", "get_hidden_bytes", "_buffer", "_hybrid_ep_buffer"),),
    ),
    Internal(
        "core.transformer.moe.fused_a2a.HybridEPDispatch",
        "exchange/flex.py",
        "its backward is a call of the transport, with the same arguments",
        "mixed-up tokens",
        (says("combine_with_unpermute(hidden=grad_x,probs=grad_probs,handle=handle", method="backward"),),
    ),
    Internal(
        "core.transformer.moe.fused_a2a.HybridEPCombine",
        "exchange/flex.py",
        "likewise, forward and backward",
        "mixed-up tokens",
        (
            says("combine_with_unpermute(hidden=x,handle=handle", method="forward"),
            says(
                "dispatch_with_permute(hidden=grad_x,scaling_factor=None,handle=handle",
                "num_permuted_tokens=ctx.num_permuted_tokens",
                method="backward",
            ),
        ),
    ),
    Internal(
        "core.transformer.moe.router.TopKRouter",
        "layers/router.py layers/layer.py layers/gates.py tools/gate_check.py launch/routing_recorder.py",
        "subclassed; `forward` runs on a chunk, with its losses intercepted and without dropping",
        "routing, losses or expert bias differ from stock",
        (
            has("gating", "is_aux_loss_enabled", "attach_and_log_load_balancing_loss", "set_layer_number"),
            sets("topk", "score_function", "expert_bias"),
            begins_with("routing_map", method="_apply_expert_bias"),
            begins_with("logits", method="apply_z_loss"),
            begins_with("probs", "scores_for_aux_loss", "routing_map", method="_apply_aux_loss"),
            begins_with("probs", "scores_for_aux_loss", "routing_map", method="_apply_global_aux_loss"),
            begins_with(
                "probs",
                "scores_for_aux_loss",
                "routing_map",
                "seq_length",
                "bsz",
                method="_apply_seq_aux_loss",
            ),
            says("self.gating(input)", "self.routing(logits", method="forward"),
            says(
                "logits = self.apply_z_loss(logits",
                "if self.config.moe_expert_capacity_factor is not None:",
                "if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():",
                "self._apply_expert_bias(routing_map, padding_mask=padding_mask)",
                method="routing",
            ),
        ),
    ),
    Internal(
        "core.transformer.moe.router.InferenceTopKRouter",
        "layers/gates.py",
        "refused as the router of a pipelined layer",
        "start-up fails",
    ),
    Internal(
        "core.transformer.moe.moe_utils.router_gating_linear",
        "layers/gates.py",
        "the linear layers of shipped routers, in the dtype of the router",
        "start-up fails, or logits in another precision",
        (begins_with("inp", "weight", "bias", "router_dtype"),),
    ),
    Internal(
        "core.transformer.moe.moe_utils.compute_routing_scores_for_aux_loss",
        "layers/router.py",
        "scores for the auxiliary losses, once per block",
        "another auxiliary loss",
        (
            begins_with("logits", "topk", "score_function"),
            takes("fused"),
            says("return (routing_map, scores)"),
        ),
    ),
    Internal(
        "core.transformer.moe.moe_utils.get_capacity",
        "layers/block_routing.py",
        "capacity of the whole block",
        "other tokens dropped",
        (begins_with("num_tokens", "num_experts", "capacity_factor"), behaves(_rounds_capacity_up)),
    ),
    Internal(
        "core.transformer.moe.moe_utils",
        "layers/router.py",
        "random logits, and the bias of `--moe-router-force-biased`, which a block draws once",
        "random routing has another distribution",
        (has("apply_random_logits", "RandomSTEShared"),),
    ),
    Internal(
        "core.transformer.moe.moe_utils.apply_biased_logits",
        "layers/router.py",
        "what a chunk does in place of it: random logits for every token, one bias for the block",
        "random routing has another distribution",
        (
            begins_with("logits", "std", "layer_number"),
            says("apply_random_logits(logits)", "RandomSTEShared.apply(logits, std, layer_number)"),
        ),
    ),
    Internal(
        "core.transformer.moe.router_replay.RouterReplay",
        "layers/block_routing.py",
        "mirrored for the tokens of a chunk",
        "a replay prescribes or records other experts",
        (
            begins_with("scores", "topk", "num_groups", "group_topk", method="get_replay_topk"),
            sets("target_topk_idx", "router_replay_action", "replay_backward_list"),
            begins_with("topk_indices", method="record_indices"),
        ),
    ),
    Internal(
        "core.transformer.moe.router_trace.RouterTracer",
        "layers/block_routing.py",
        "its hook is called once for all chunks of a block",
        "`--moe-routing-trace-path` writes nothing",
        (
            says("module.register_forward_hook(self.make_hook(module_name))", method="register_hooks"),
            says("len(outputs) != 2", method="_record"),
        ),
    ),
    Internal(
        "core.transformer.moe.moe_utils.apply_router_token_dropping",
        "layers/block_routing.py layers/gates.py launch/host/megatron.py launch/host/dropping.py",
        (
            "what `CapacityCounter` reproduces; called for a capacity per chunk; its ties are broken by "
            "index on the host platform"
        ),
        "other tokens dropped",
        (
            begins_with("routing_probs", "routing_map", "router_topk", "capacity_factor"),
            takes("drop_policy", "pad_to_capacity"),
            says("torch.topk(", "dim=0", "k=expert_capacity"),
        ),
    ),
    Internal(
        "core.transformer.moe.moe_utils.permute",
        "exchange/packing.py",
        "sorts gathered tokens by expert, and tokens by rank, with a number known to the host",
        "tokens in another order, or a wait of the host in every chunk",
        (
            takes("tokens", "routing_map", "probs", "num_out_tokens", "fused"),
            says("return (permuted_input, permuted_probs, sorted_indices,", "tokens_per_expert)"),
        ),
    ),
    Internal(
        "core.transformer.moe.moe_utils.sort_chunks_by_idxs",
        "exchange/packing.py",
        "with fused permutations, puts rows that arrive by source into the order of the experts, and back",
        "mixed-up tokens",
        (
            begins_with("input", "split_sizes", "sorted_idxs", "probs"),
            takes("fused"),
            says("fused_sort_chunks_by_index_with_probs(input, probs, split_sizes, sorted_idxs)"),
        ),
    ),
    Internal(
        "core.transformer.moe.moe_utils.unpermute",
        "exchange/packing.py",
        "adds the outputs of the experts for each row that was sent",
        "wrong outputs",
        (
            begins_with("permuted_tokens", "sorted_indices", "restore_shape"),
            takes("probs", "routing_map", "fused"),
        ),
    ),
    Internal(
        "core.transformer.moe.moe_utils.MoEAuxLossAutoScaler",
        "layers/router.py runtime/stack_call.py",
        "adds the gradient of a loss whatever gradient comes in",
        "no gradient of the router's losses",
        (behaves(_adds_its_gradient_whatever_comes_in),),
    ),
    Internal(
        "core.transformer.spec_utils.ModuleSpec",
        "layers/layer.py layers/hybrid.py launch/recipes.py launch/host/hybrid_layers.py tools/measuring",
        "a layer's specification is rewritten",
        "start-up fails",
        (fields("module", "params", "submodules"),),
    ),
    Internal(
        "core.transformer.transformer_block.TransformerBlockSubmodules",
        "layers/layer.py tools/measuring",
        "holds the specifications of all layers",
        "start-up fails",
        (fields("layer_specs", "layer_norm"),),
    ),
    Internal(
        "core.transformer.transformer_block.TransformerBlock",
        "layers/block_stack.py layers/layer.py launch/adjustments.py",
        "builds layers in order and calls each with what the one before it returned; its full recompute is "
        "set aside where the schedules recompute",
        "layers that share a schedule get the wrong rows, or are recomputed twice",
        (
            says("self.config.recompute_granularity == 'full' and self.training", method="forward"),
            says("for i, layer_spec in enumerate(self.submodules.layer_specs)", method="_build_layers"),
            says(
                "for l_no, layer in enumerate(self.layers):",
                "hidden_states, context = layer( hidden_states=hidden_states,",
                method="forward",
            ),
        ),
    ),
    Internal(
        "core.transformer.mlp.MLP",
        "compat.py layers/hybrid.py layers/moe_stages.py",
        "of a dense layer that shares a schedule; called with the rows of one chunk",
        "dense layers keep their own schedule, or compute something else than the stock layer",
        (takes("hidden_states", method="forward"),),
    ),
    Internal(
        "core.tensor_parallel.mappings.all_to_all",
        "layers/block_stack.py",
        "moves rows between tensor-parallel ranks before and after layers that share a schedule",
        "stacks fail under tensor parallelism",
        (takes("group", "input_", "output_split_sizes_", "input_split_sizes"),),
    ),
    Internal(
        "core.transformer.transformer_layer.TransformerLayerSubmodules",
        "layers/layer.py",
        "the router in an MoE layer's specification is replaced",
        "start-up fails",
        (fields("mlp", "self_attention", "input_layernorm", "pre_mlp_layernorm"),),
    ),
    Internal(
        "core.transformer.transformer_layer.MoETransformerLayer",
        "layers/hybrid.py launch/host/hybrid_layers.py",
        "subclassed for the MoE layers of hybrid models",
        "hybrid models are not pipelined",
        (has("forward", "_forward_mlp"),),
    ),
    Internal(
        "core.models.hybrid.hybrid_block.HybridStack",
        "layers/hybrid.py launch/host/hybrid_layers.py",
        ("subclassed; calls its layers one after another, which is why an attention layer can run the next"),
        "a layer runs twice or not at all",
        (
            sets("layers", "layer_type_list"),
            says("for layer in self.layers:", method="forward"),
            says("submodules.attention_layer,", "submodules.moe_layer,", method="__init__"),
        ),
    ),
    Internal(
        "core.models.hybrid.hybrid_block.HybridStackSubmodules",
        "layers/hybrid.py launch/host/hybrid_layers.py",
        "its layer specifications are replaced; all of them on the host platform, by local ones",
        "start-up fails",
        (fields("attention_layer", "mla_layer", "moe_layer", "mlp_layer", "mamba_layer", "mtp_block_spec"),),
    ),
    Internal(
        "core.ssm.mlp_layer.MLPLayer",
        "layers/hybrid.py launch/host/hybrid_layers.py",
        "subclassed: an MLP layer after an attention layer can share a schedule",
        "such a layer runs twice or not at all",
    ),
    Internal(
        "core.models.hybrid.hybrid_layer_specs.hybrid_stack_spec",
        "launch/pretrain.py launch/recipes.py launch/host/hybrid_layers.py",
        "Megatron's own layers of a hybrid model; on the host platform its contents are replaced",
        "another model than the stock run's; hybrid models fail on a CPU host",
        (has("submodules"),),
    ),
    # The launch.
    Internal(
        "training.models.gpt.GPTModelConfig",
        "launch/pretrain.py",
        "`transformer_layer_spec` receives our specification",
        "layers stay stock",
        (fields("transformer", "transformer_layer_spec"),),
    ),
    Internal(
        "training.models.gpt.GPTModelBuilder",
        "launch/pretrain.py",
        "calls `transformer_layer_spec` where it is callable",
        "start-up fails, or layers stay stock",
        (
            says(
                "callable(transformer_layer_spec)",
                "transformer_layer_spec(self._model_config, vp_stage=vp_stage)",
                method="build_model",
            ),
        ),
    ),
    Internal(
        "training.models.gpt.default_layer_spec",
        "launch/pretrain.py launch/recipes.py",
        "the specification that is rewritten: Megatron's own choice",
        "another model than the stock run's",
        (begins_with("config", "vp_stage"),),
    ),
    Internal(
        "core.utils.unwrap_model",
        "launch/trace.py launch/hooks.py launch/gate.py",
        "is the model training or evaluating; which class it is; it is given hooks for the ids of tokens",
        "evaluation is recorded in traces; a router that reads ids is refused in the first iteration",
        (begins_with("model"),),
    ),
    Internal(
        "core.models.gpt.GPTModel",
        "launch/hooks.py launch/patched.py layers/gates.py",
        "its constructor is wrapped, or patched: the layer specification passes through; its first argument "
        "is the ids of the tokens, which are below its `vocab_size`",
        "layers stay stock; the launcher refuses the run; a router that reads ids is refused",
        (
            begins_with("config", "transformer_layer_spec", method="__init__"),
            begins_with("input_ids", method="forward"),
            sets("vocab_size"),
        ),
    ),
    Internal(
        "core.models.hybrid.hybrid_model.HybridModel",
        "launch/hooks.py layers/gates.py",
        "its constructor is wrapped: the specification of its stack passes through; its first argument is "
        "the ids of the tokens, which are below its `vocab_size`",
        "layers stay stock; the launcher refuses the run; a router that reads ids is refused",
        (
            begins_with("config", "hybrid_stack_spec", method="__init__"),
            begins_with("input_ids", method="forward"),
            sets("vocab_size"),
        ),
    ),
    Internal("training.initialize", "launch/hooks.py", "holds both by name in 0.17", "as above, on 0.17"),
    Internal(
        "training.training.setup_model_and_optimizer",
        "launch/hooks.py",
        "wrapped: the models it returns must have AMPipe's layers",
        "a model without AMPipe is noticed after training only",
        (says("return (model, optimizer, opt_param_scheduler)"),),
    ),
    Internal(
        "training.training.get_model",
        "launch/attach.py",
        "builds `DistributedDataParallel` on a separate stream; here it is built on that of training",
        "the constructor of `DistributedDataParallel` is wrapped for nothing",
        (says("with torch.cuda.stream(ddp_stream):"),),
    ),
    Internal(
        "training.arguments.parse_and_validate_args",
        "launch/pretrain.py launch/hooks.py",
        "parses and checks all flags; takes AMPipe's as extra arguments",
        "start-up fails",
        (takes("extra_args_provider", "args_defaults"), says("parse_args(", "validate_args(")),
    ),
    Internal(
        "training.arguments.add_megatron_arguments",
        "launch/command_line.py",
        "every flag, with its type and choices: what files are checked against",
        "files of settings cannot be checked",
        (begins_with("parser"),),
    ),
    Internal(
        "training.arguments.parse_args",
        "launch/pretrain.py launch/hooks.py",
        ("`ampipe config` parses as a launch does; wrapped by the launcher, so that it knows our flags"),
        "`ampipe config --ranks` fails; our flags are unknown",
        (begins_with("extra_args_provider"),),
    ),
    Internal(
        "training.arguments.validate_args",
        "launch/pretrain.py launch/hooks.py",
        "Megatron's own checks, for `ampipe config`; wrapped by the launcher: our refusals follow",
        "`ampipe config --ranks` fails; the launcher does nothing, and says so at the end",
        (begins_with("args", "defaults"), says("return args")),
    ),
    Internal(
        "training.argument_utils.hybrid_config_from_args",
        "launch/pretrain.py",
        "as `gpt_config_from_args`, for hybrid models",
        "AMPipe's entry point cannot build hybrid models",
        (begins_with("args"), says("kwargs['hybrid_stack_spec'] = import_module(args.spec)")),
    ),
    Internal(
        "training.argument_utils.gpt_config_from_args",
        "launch/pretrain.py",
        "flags to model configuration",
        "start-up fails",
        (begins_with("args"),),
    ),
    Internal(
        "training.argument_utils.pretrain_cfg_container_from_args",
        "launch/pretrain.py",
        "flags to run configuration",
        "start-up fails",
        (begins_with("args", "model_cfg"),),
    ),
    Internal(
        "training.pretrain",
        "launch/pretrain.py launch/hooks.py",
        "the training loop",
        "start-up fails",
        (
            says("setup_model_and_optimizer("),
            begins_with(
                "cfg_container", "train_valid_test_dataset_provider", "model_type", "forward_step_func"
            ),
            takes("store", "get_embedding_ranks"),
        ),
    ),
    Internal(
        "training.set_startup_timestamps",
        "launch/pretrain.py",
        "start time for Megatron's log",
        "start-up fails",
        (takes("program_start", "main_entry"),),
    ),
    Internal(
        "training.inprocess_restart",
        "launch/pretrain.py",
        "`pretrain` is wrapped as Megatron's script wraps it",
        "start-up fails",
        (has("maybe_wrap_for_inprocess_restart"),),
    ),
    Internal(
        "core.enums.ModelType",
        "launch/pretrain.py",
        "argument of `pretrain`",
        "start-up fails",
        (has("encoder_or_decoder"),),
    ),
    Internal(
        "training.training",
        "launch/command_line.py launch/attach.py launch/hooks.py launch/host/megatron.py launch/metrics.py "
        "launch/record_routing.py launch/session.py",
        (
            "imported first, so that the environment is checked early; `initialize_megatron` is "
            "replaced in it on the host platform, `training_log` while a run lasts; `train_step` is "
            "wrapped for `--ampipe-degree auto` and `--ampipe-routing-dir`, and restored; sets "
            "`args.curr_iteration`"
        ),
        "start-up fails; the degree is never chosen; traces name no iteration",
        (has("initialize_megatron", "train", "evaluate", "train_step"),),
    ),
    Internal(
        "training.training.training_log",
        "launch/metrics.py tools/measuring",
        "wrapped: our figures follow it; `ampipe bench --end-to-end` reads its line",
        "no figures of AMPipe; no times are found",
        (
            takes("iteration"),
            says("iteration % args.log_interval == 0", "' iteration {:8d}/{:8d} |'"),
            says("' elapsed time per iteration (ms): {:.1f} |'", "' {}: {:.6E} |'"),
        ),
    ),
    Internal(
        "training.global_vars.get_tensorboard_writer",
        "launch/metrics.py",
        "receives our scalars",
        "start-up fails",
    ),
    Internal("training.global_vars.get_wandb_writer", "launch/metrics.py", "likewise", "start-up fails"),
    Internal(
        "training.print_rank_last",
        "launch/metrics.py",
        "prints our line where Megatron prints its own",
        "start-up fails",
        (begins_with("message"),),
    ),
    Internal(
        "core.datasets.utils.compile_helpers",
        "launch/dataset_helpers.py",
        "replaced where the wheel has the compiled helper and no Makefile",
        "every run ends in `make`",
        (says("'make'"),),
    ),
    Internal(
        "training.utils.get_blend_and_blend_per_split",
        "launch/data_paths.py launch/gpt.py",
        "which data files a run names",
        "missing data is found late",
        (begins_with("args"),),
    ),
    Internal(
        "core.datasets.blended_megatron_dataset_config.parse_and_normalize_split",
        "launch/data_paths.py",
        "reads `--split` as Megatron does",
        "a run is refused, or hangs, for a split that is fine, or empty",
        (begins_with("split"),),
    ),
    Internal(
        "core.datasets.blended_megatron_dataset_config.convert_split_vector_to_split_matrix",
        "launch/data_paths.py",
        "where training, validation and test begin and end",
        "likewise",
        (begins_with("vector_a"), says("overlap = None")),
    ),
    Internal(
        "core.datasets.indexed_dataset._IndexReader",
        "launch/data_paths.py",
        "opens an index, and gives lengths and places of its sequences",
        "sound datasets are refused",
        (
            begins_with("idx_path", "multimodal", method="__init__"),
            says(
                "self.sequence_lengths =",
                "self.sequence_pointers =",
                "self.document_indices =",
                method="__init__",
            ),
        ),
    ),
    Internal(
        "training.checkpointing.read_metadata",
        "launch/checkpoints.py",
        "reads the note of the newest checkpoint; leaves by `sys.exit()`, as success, at a wrong one",
        "a wrong note ends a run with 0",
        (begins_with("tracker_filename"), says("release = metastring == 'release'", "sys.exit()")),
    ),
    Internal(
        "training.checkpointing.get_checkpoint_name",
        "launch/checkpoints.py",
        "the folder of a checkpoint",
        "a sound checkpoint is refused",
        (begins_with("checkpoints_path", "iteration", "release"), says("return_base_dir")),
    ),
    Internal(
        "core.dist_checkpointing.check_is_distributed_checkpoint",
        "launch/checkpoints.py",
        "whether there is an index of torch's to open",
        "a damaged index is found late",
        (begins_with("checkpoint_dir"),),
    ),
    Internal(
        "training.checkpointing.load_checkpoint",
        "launch/failures.py",
        "what fails in it is said to be the checkpoint's fault",
        "a bad checkpoint ends a run with a traceback in place of one line",
    ),
    Internal(
        "training.global_vars",
        "launch/failures.py",
        "the arguments, after a failure",
        "a message names neither folder nor time-out",
        (has("_GLOBAL_ARGS"),),
    ),
    # One training step, as in Megatron's own GPT script.
    Internal(
        "core.mpu",
        "launch/gpt.py",
        "which ranks load data",
        "a training step fails",
        (
            has("get_tensor_model_parallel_rank", "get_tensor_model_parallel_src_rank"),
            has("get_tensor_model_parallel_group", "is_pipeline_first_stage", "is_pipeline_last_stage"),
        ),
    ),
    Internal(
        "core.parallel_state.get_context_parallel_group",
        "launch/gpt.py",
        "splits a batch over context-parallel ranks",
        "a training step fails",
    ),
    Internal(
        "core.parallel_state.get_hybrid_data_context_parallel_groups",
        "launch/gpt.py",
        "likewise, for hybrid context parallelism",
        "a training step fails",
    ),
    Internal(
        "core.parallel_state.get_expert_data_parallel_rank",
        "launch/routing_recorder.py",
        "which expert-parallel group is recorded",
        "a recorded iteration fails",
    ),
    Internal(
        "core.parallel_state.get_expert_model_parallel_world_size",
        "launch/routing_recorder.py",
        "between how many ranks the experts are divided",
        "a recorded iteration fails",
    ),
    Internal(
        "core.parallel_state.get_expert_tensor_and_model_parallel_group",
        "launch/routing_recorder.py",
        "the ranks of which a micro-batch is recorded",
        "a recorded iteration fails",
    ),
    Internal(
        "core.datasets.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder",
        "launch/gpt.py",
        "builds the datasets",
        "start-up fails",
        (begins_with("cls", "sizes", "is_built_on_rank", "config", method="__init__"), has("build")),
    ),
    Internal(
        "core.datasets.gpt_dataset.GPTDataset", "launch/gpt.py", "dataset of real text", "start-up fails"
    ),
    Internal(
        "core.datasets.gpt_dataset.MockGPTDataset",
        "launch/gpt.py",
        "dataset of `--mock-data`",
        "start-up fails",
    ),
    Internal(
        "core.datasets.gpt_dataset.GPTDatasetConfig",
        "launch/gpt.py",
        "flags of the data become its fields",
        "start-up fails, or a data flag has no effect",
        (
            fields("tokenizer", "random_seed", "sequence_length", "blend", "blend_per_split", "split"),
            fields("multiple_validation_sets", "full_validation", "sequences_per_dataset", "path_to_cache"),
            fields("num_dataset_builder_threads", "mid_level_dataset_surplus", "allow_ambiguous_pad_tokens"),
            fields("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"),
            fields(
                "inter_document_masking", "object_storage_cache_path", "mmap_bin_files", "fast_cache_load"
            ),
            fields("defer_npy_index_mmap", "context_parallel_size", "data_parallel_size"),
            fields("sequence_parallel_size", "hybrid_context_parallel"),
        ),
    ),
    Internal(
        "training.datasets.fim_dataset.GPTFIMDataset",
        "launch/gpt.py",
        "dataset of `--fim-data`",
        "start-up fails",
    ),
    Internal(
        "training.datasets.fim_dataset.GPTFIMDatasetConfig",
        "launch/gpt.py",
        "its configuration",
        "start-up fails",
        (
            fields("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix"),
            fields("fim_extra_tokens"),
        ),
    ),
    Internal(
        "training.datasets.sft_dataset.SFTDataset",
        "launch/gpt.py",
        "dataset of `--sft`",
        "start-up fails",
    ),
    Internal(
        "core.packed_seq_params.PackedSeqParams",
        "launch/gpt.py launch/host/core_attention.py layers/document_reader.py layers/block_modules.py",
        "bounds of packed documents",
        "a training step fails",
        (
            fields("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded"),
            fields("cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "local_cp_size", "cp_group"),
            fields("tokens_per_sample"),
        ),
    ),
    Internal(
        "core.rerun_state_machine.get_rerun_state_machine",
        "launch/gpt.py",
        "checks the loss for NaN and spikes, as the stock script does",
        "a training step fails",
        (behaves(lambda get: all(hasattr(get(), n) for n in ("validate_result", "is_unexpectedly_large"))),),
    ),
    Internal(
        "core.tokenizers.utils.build_tokenizer.build_tokenizer",
        "launch/gpt.py",
        "tokenizer of the datasets",
        "start-up fails",
        (begins_with("args"),),
    ),
    Internal(
        "core.transformer.multi_token_prediction.get_mtp_ranks",
        "launch/gpt.py",
        "which ranks hold the embedding",
        "start-up fails with MTP",
        (begins_with("pp_ranks", "config"),),
    ),
    Internal(
        "core.transformer.multi_token_prediction.mtp_on_this_rank",
        "launch/gpt.py",
        "which ranks load data",
        "a training step fails with MTP",
        (takes("layout", "mtp_num_layers", "ignore_virtual", "vp_stage"),),
    ),
    Internal(
        "core.utils.StragglerDetector",
        "launch/gpt.py",
        "times the step, as the stock script does",
        "a training step fails",
        (has("__call__", "__enter__"),),
    ),
    Internal(
        "core.utils.flatten_batch_for_packed_sequences",
        "launch/gpt.py",
        "packed batches",
        "a training step fails",
        (begins_with("batch"),),
    ),
    Internal(
        "core.utils.get_attr_wrapped_model",
        "launch/gpt.py",
        "virtual pipeline stage of a model",
        "a training step fails",
        (begins_with("model", "attr"),),
    ),
    Internal(
        "core.utils.get_model_config",
        "launch/gpt.py",
        "configuration of a model",
        "a training step fails",
        (begins_with("model"),),
    ),
    Internal(
        "core.utils.get_batch_on_this_tp_rank",
        "launch/gpt.py",
        "gives a batch to all tensor-parallel ranks",
        "a training step fails",
        (
            takes("has_cu_seqlens", "is_hybrid_cp", "create_attention_mask_in_dataloader"),
            takes("broadcast_src_rank", "broadcast_group", "cp_size", "tp_rank", "micro_batch_size"),
            takes("seq_length", "mtp_on_this_rank", "pipeline_model_parallel_size"),
            takes("is_pipeline_first_stage", "is_pipeline_last_stage"),
        ),
    ),
    Internal(
        "core.utils.get_batch_on_this_cp_rank",
        "launch/gpt.py layers/chunk_attention.py schedule/chunks.py",
        "splits a batch in zigzag; chunks assume that order",
        "with context parallelism, queries see the wrong keys",
        (takes("is_hybrid_cp", "cp_group", "hybrid_cp_group_func", "use_per_sequence_balancing"),),
    ),
    Internal(
        "training.get_args",
        "launch/gpt.py",
        "Megatron's arguments in a training step",
        "a training step fails",
    ),
    Internal("training.get_timers", "launch/gpt.py", "Megatron's timers", "a training step fails"),
    Internal(
        "training.print_rank_0",
        "launch/gpt.py",
        "messages about datasets",
        "start-up fails",
        (begins_with("message"),),
    ),
    Internal(
        "training.arguments.core_transformer_config_from_args",
        "launch/gpt.py",
        "which ranks hold the embedding or load data",
        "start-up fails",
        (begins_with("args"),),
    ),
    Internal(
        "training.training.update_seqlen_stats_from_cu_seqlens",
        "launch/gpt.py",
        "counts the tokens of packed batches",
        "a training step fails",
        (begins_with("cu_seqlens"),),
    ),
    Internal(
        "training.utils.is_first_or_last_pipeline_stage",
        "launch/gpt.py",
        "which ranks need data",
        "a training step fails",
        (begins_with("vp_stage"),),
    ),
    Internal(
        "training.distillation.LossFuncCallable",
        "launch/gpt.py",
        "loss against a teacher's stored probabilities",
        "distillation fails",
        (
            takes("logprobs_dir", "decode_threads", "prefetch_factor", "kd_loss_alpha", method="__init__"),
            takes("ignore_errors", "msc_prefetch_depth", method="__init__"),
        ),
    ),
    # The host platform.
    Internal(
        "core.tensor_parallel.random._get_cuda_rng_state",
        "launch/host/megatron.py launch/host/random.py",
        "replaced: the device's random state is the CPU's",
        "dropout on a CPU host is not reproducible",
    ),
    Internal(
        "core.tensor_parallel.random._set_cuda_rng_state",
        "launch/host/megatron.py launch/host/random.py",
        "likewise",
        "dropout on a CPU host is not reproducible",
        (begins_with("new_state"),),
    ),
    Internal(
        "core.tensor_parallel.random.CheckpointFunction",
        "layers/recompute.py launch/host/random.py",
        "its refusal of `autograd.grad` is why stages recompute by themselves",
        "recompute could be left to Megatron",
        (says("torch.autograd._is_checkpoint_valid()", "torch.autograd.backward(", method="backward"),),
    ),
    Internal(
        "core.tensor_parallel.random._get_all_rng_states",
        "layers/recompute.py",
        "random state in which a stage ran that runs again",
        "a recomputed layer draws other dropout masks than its forward pass",
        (says("torch.get_rng_state()", "get_cuda_rng_tracker().get_states()"),),
    ),
    Internal(
        "core.tensor_parallel.random._set_all_rng_states",
        "layers/recompute.py",
        "likewise",
        "likewise",
        (begins_with("cpu_rng_state", "cuda_rng_state", "cuda_rng_state_tracker"),),
    ),
    Internal(
        "core.tensor_parallel.random._fork_rng",
        "layers/recompute.py",
        "random states are restored after a stage that runs again",
        "a run is not reproducible under recompute",
        (says("_set_all_rng_states(*current_states)"),),
    ),
    Internal(
        "core.tensor_parallel.checkpoint",
        "layers/layer.py",
        "full recompute of dense layers that run as Megatron's",
        "those layers fail",
        (begins_with("function", "distribute_saved_activations"),),
    ),
    Internal(
        "core.transformer.moe.moe_utils.maybe_move_tensor_to_cpu",
        "launch/host/megatron.py",
        "replaced: gloo takes split sizes as integers",
        "stock layers fail on a CPU host",
        (begins_with("tensor", "as_numpy", "record_stream"),),
    ),
    Internal(
        "core.transformer.moe.token_dispatcher",
        "launch/host/megatron.py",
        "the same name is replaced here too",
        "stock layers fail on a CPU host",
        (has("maybe_move_tensor_to_cpu"),),
    ),
    Internal(
        "core.transformer.moe.router",
        "launch/host/megatron.py layers/router.py",
        "`apply_router_token_dropping` is replaced here: ties go to the lower index",
        "stock drops other tokens on a CPU host, and AMPipe seems to differ",
        (
            has("apply_router_token_dropping"),
            behaves(lambda module: _drops_by_position_as_the_ledger_does(module.apply_router_token_dropping)),
        ),
    ),
    Internal(
        "core.transformer.moe.moe_layer",
        "launch/host/latent_projection.py",
        "the linear layer before and after latent experts is replaced here",
        "`--moe-latent-size` fails on a CPU host",
        (has("HAVE_TE", "TELinear"),),
    ),
    Internal(
        "core.tensor_parallel.mappings._gather_along_first_dim",
        "launch/host/megatron.py launch/host/uneven_collectives.py",
        "replaced: gloo gathers equal parts only",
        "tensor-parallel experts fail on a CPU host",
        (begins_with("input_", "group", "output_split_sizes"),),
    ),
    Internal(
        "core.tensor_parallel.mappings._reduce_scatter_along_first_dim",
        "launch/host/megatron.py launch/host/uneven_collectives.py",
        "likewise",
        "tensor-parallel experts fail on a CPU host",
        (begins_with("input_", "group", "input_split_sizes"),),
    ),
    Internal(
        "core.models.backends.LocalSpecProvider",
        "launch/host/megatron.py tools/measuring",
        (
            "`core_attention` is replaced: context parallelism and latent attention in local layers; "
            "our kernel in the stock runs of `ampipe bench --end-to-end`"
        ),
        "both fail on a CPU host; stock and AMPipe are compared with different kernels",
        (has("core_attention"),),
    ),
    Internal(
        "core.transformer.torch_norm.WrappedTorchNorm",
        "launch/host/megatron.py launch/host/norm.py launch/host/hybrid_layers.py",
        "replaced: torch's norm, marked for sequence parallelism",
        "norm weights drift apart under sequence parallelism on a CPU host",
        (takes("config", "hidden_size", "eps", method="__new__"),),
    ),
    Internal(
        "core.ssm.mamba_mixer",
        "launch/host/hybrid_layers.py",
        "its names of the package mamba-ssm are replaced by torch functions",
        "Mamba layers fail on a CPU host",
        (
            has("HAVE_MAMBA_SSM", "mamba_split_conv1d_scan_combined", "ExtendedRMSNorm"),
            has("_check_mamba_sequence_packing_support"),
        ),
    ),
    Internal(
        "core.ssm.mamba_mixer.MambaMixer",
        "launch/host/hybrid_layers.py launch/host/mamba.py",
        "calls these names",
        "Mamba layers fail on a CPU host",
        (
            says("mamba_split_conv1d_scan_combined(", "D=", "headdim=", "ngroups=", method="_ssm_training"),
            says("ExtendedRMSNorm(", "group_size=", "norm_before_gate=", method="__init__"),
        ),
    ),
    *(
        Internal(
            name,
            "launch/host/hybrid_layers.py",
            "a module of the local layers of hybrid models",
            "hybrid models fail on a CPU host",
        )
        for name in (
            "core.ssm.mamba_mixer.MambaMixerSubmodules",
            "core.ssm.mamba_layer.MambaLayer",
            "core.ssm.mamba_layer.MambaLayerSubmodules",
            "core.fusions.fused_bias_dropout.get_bias_dropout_add",
            "core.transformer.identity_op.IdentityOp",
            "core.transformer.identity_op.IdentityFuncOp",
            "core.transformer.multi_token_prediction.MultiTokenPredictionBlock",
            "core.transformer.multi_token_prediction.MultiTokenPredictionBlockSubmodules",
            "core.transformer.multi_token_prediction.MultiTokenPredictionLayer",
            "core.transformer.multi_token_prediction.MultiTokenPredictionLayerSubmodules",
        )
    ),
    Internal(
        "core.transformer.utils.make_sharded_tensors_for_checkpoint",
        "launch/host/mamba.py",
        "the norm of a Mamba layer in a checkpoint",
        "hybrid models cannot be saved on a CPU host",
        (takes("tp_group", "dp_cp_group"),),
    ),
    Internal(
        "core.jit.disable_jit_fuser",
        "launch/host/megatron.py",
        "no compilation on a CPU host",
        "slow start on a CPU host",
    ),
    Internal(
        "training.initialize.initialize_megatron",
        "launch/host/megatron.py",
        "`allow_no_cuda` is set",
        "training does not start on a CPU host",
        (takes("allow_no_cuda"),),
    ),
    # Tools.
    Internal(
        "core.datasets.indexed_dataset.IndexedDatasetBuilder",
        "tools/data_command.py",
        "`ampipe data` writes with it",
        "datasets cannot be written",
        (
            begins_with("bin_path", "dtype", method="__init__"),
            has("add_document", "finalize"),
            sets("data_file"),
        ),
    ),
    Internal(
        "core.models.gpt.gpt_layer_specs.get_gpt_layer_local_spec",
        "tools/measuring launch/host/hybrid_layers.py",
        "builds the stock layer to compare with; its halves are the local layers of hybrid models",
        "benchmarks fail; hybrid models fail on a CPU host",
    ),
    Internal(
        "core.extensions.transformer_engine_spec_provider.TESpecProvider",
        "tools/measuring",
        "gives Transformer Engine's grouped experts",
        "benchmarks of them fail",
    ),
    Internal(
        "core.transformer.moe.experts.TEGroupedMLP",
        "tools/measuring",
        "is built on torch's grouped product where Transformer Engine is missing",
        "benchmarks of grouped experts fail",
        (
            begins_with("num_local_experts", "config", "submodules", method="__init__"),
            says("tokens_per_expert.tolist()", method="forward"),
        ),
    ),
    Internal(
        "core.transformer.moe.experts.GroupedMLPSubmodules",
        "tools/measuring",
        "likewise",
        "benchmarks of grouped experts fail",
    ),
    Internal(
        "core.parallel_state.initialize_model_parallel",
        "tools/measuring launch/adjustments.py",
        "process groups of a benchmark; names of the groups whose collectives get a high priority",
        "benchmarks fail; collectives wait for computation",
        (
            takes("high_priority_stream_groups"),
            says("get_nccl_options('ep'", "get_nccl_options('ep_tp'", "get_nccl_options('tp_ep_mp'"),
        ),
    ),
    Internal(
        "core.tensor_parallel.random.model_parallel_cuda_manual_seed",
        "tools/measuring",
        "seeds a benchmark",
        "benchmarks fail",
    ),
    Internal(
        "core.transformer.spec_utils.build_module",
        "tools/measuring",
        "builds the layers of a benchmark",
        "benchmarks fail",
    ),
    Internal(
        "core.transformer.transformer_config.TransformerConfig",
        "tools/measuring tools/gate_check.py",
        "configuration of a benchmark's layers, and of the router that `ampipe gate` checks",
        "benchmarks and checks fail",
    ),
    Internal(
        "core.process_groups_config.ProcessGroupCollection",
        "tools/gate_check.py",
        "groups of the router that `ampipe gate` checks",
        "checks fail",
    ),
]


HEAD = """\
# Megatron internals

Every name of Megatron that the package imports, subclasses, mirrors or replaces, without `megatron.`.
Written by `python -m tests.internals > docs/internals.md` from `tests/internals.py`, which also lists the
files that use a name, what a change breaks, and the facts that `tests/megatron/test_megatron_names.py`
checks. The last column is empty for names in Megatron 0.17 to 0.20; otherwise it lists the versions, with a
star where a fact differs, which `compat.py` handles or only AMPipe's entry point needs.

| name | what for | seen in |
|---|---|---|"""


def render() -> Iterator[str]:
    """The page, line by line."""
    yield HEAD
    everywhere = ", ".join(recorded())
    for internal in INTERNALS:
        seen = versions_with(internal.name).replace(everywhere, "")
        yield f"| `{internal.name}` | {internal.used_for} | {seen} |"


if __name__ == "__main__":
    print("\n".join(render()))
