"""A GPT training step and its data: the functions that ``megatron.training.pretrain`` calls back.

They do the same as Megatron's own GPT pretraining script, which is not in the wheel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_model_config,
)
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_ampipe.launch.megatron_types import LayoutOfModel, Model

Batch = dict[str, torch.Tensor | None]
Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""The loss of a micro-batch, the number of tokens in it, and (sum, tokens) to report by name."""
Samples = Iterator[dict[str, torch.Tensor]]

FIELDS = (
    "tokens",
    "labels",
    "loss_mask",
    "attention_mask",
    "position_ids",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
)
"""The fields of a batch; a field that this pipeline stage or this kind of data does not need is None."""
Datasets = tuple[object, object, object]
"""The training, validation and test datasets."""
PACKING_FIELDS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
"""The fields that a middle pipeline stage needs, to separate documents in attention."""


def get_batch(data_iterator: Samples | None, *, config: LayoutOfModel, vp_stage: int | None) -> Batch:
    """This rank's part of the next micro-batch, which tensor-parallel rank 0 reads."""
    args = get_args()
    packed = args.sft or args.dataloader_inter_document_masking
    has_mtp = _has_mtp(config, vp_stage)
    is_edge_stage = is_first_or_last_pipeline_stage(vp_stage) or has_mtp
    if not is_edge_stage and not packed:
        return dict.fromkeys(FIELDS)

    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        assert data_iterator is not None
        loaded = next(data_iterator)
        read = {field: loaded.get(field) for field in FIELDS}
        batch = {name: None if x is None else x.cuda(non_blocking=True) for name, x in read.items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if not is_edge_stage:
        return {field: batch.get(field) if field in PACKING_FIELDS else None for field in FIELDS}
    part: Batch = get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=get_context_parallel_group(),
        use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
    )
    return part


def _has_mtp(config: LayoutOfModel, vp_stage: int | None) -> bool:
    has_mtp: bool = mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )
    return has_mtp


def _packing(batch: Batch) -> PackedSeqParams | None:
    """The bounds of the documents of a packed batch; None for a batch of whole sequences."""
    if batch["cu_seqlens"] is None:
        return None
    args = get_args()
    real = batch["cu_seqlens"].squeeze(0)
    padded = batch["cu_seqlens_padded"]
    padded = padded.squeeze(0) if padded is not None else None
    # Only real tokens count as work done.
    update_seqlen_stats_from_cu_seqlens(real)
    # Megatron's kernels take the padded bounds in both places (its own open issue).
    bounds = padded if padded is not None else real
    assert batch["max_seqlen"] is not None
    longest = int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        # Mamba layers compute the document of every row from it.
        total_tokens=int(bounds[-1].item()) if args.hybrid_layer_pattern is not None else None,
        tokens_per_sample=args.seq_length,
    )


def forward_step(
    data_iterator: Samples | None, model: Model, return_schedule_plan: bool = False
) -> tuple[object, Callable[[torch.Tensor], Loss]]:
    """Run ``model`` on a micro-batch: returns its output, or its schedule plan, and the loss function."""
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    batch = get_batch(data_iterator, config=get_model_config(model), vp_stage=vp_stage)
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    packing = _packing(batch)
    output: object
    if return_schedule_plan:
        assert get_args().overlap_moe_expert_parallel_comm
        output = model.build_schedule_plan(*inputs, **targets, packed_seq_params=packing)
    else:
        output = model(*inputs, **targets, packed_seq_params=packing)
    return output, functools.partial(loss_func, batch["loss_mask"])


def loss_func(loss_mask: torch.Tensor | None, output: torch.Tensor) -> Loss:
    """The sum of the token losses ``output [B, S]`` of one micro-batch; the mask is 1 for tokens that count.

    Returns the loss, the number of tokens in it, and a dictionary of (sum, tokens) to report.
    """
    assert loss_mask is not None, "only a stage without a loss has no mask"
    mask = loss_mask.view(-1).float()
    loss = (output.view(-1).float() * mask).sum()
    _check_loss(loss)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def _check_loss(loss: torch.Tensor) -> None:
    """Let Megatron's rerun state machine check this rank's loss, before it is averaged over ranks."""
    if not get_args().check_for_nan_in_loss_and_grad:
        return
    for rejects, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        message = f"found {name} in local forward loss calculation"
        # Tolerance 0: a forward pass is deterministic.
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=rejects, message=message, tolerance=0.0, fatal=True
        )


def embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """The pipeline ranks with a copy of the embedding: the first, the last if tied, and those with MTP."""
    if len(pp_ranks) == 1:
        return [pp_ranks[0]]
    args = get_args()
    ranks = {pp_ranks[0], *get_mtp_ranks(list(pp_ranks), core_transformer_config_from_args(args))}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pp_ranks[-1])
    return sorted(ranks)


def datasets_provider(num_samples: Sequence[int], vp_stage: int | None = None) -> Datasets:
    """The training, validation and test datasets, with these numbers of samples."""
    args = get_args()
    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    is_needed_here = functools.partial(_is_dataset_needed_here, vp_stage)
    builder = BlendedMegatronDatasetBuilder(kind, num_samples, is_needed_here, _dataset_config(args))
    datasets: Datasets = builder.build()
    return datasets


# Every rank calls the provider; the builder in it decides which ranks build.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def _is_dataset_needed_here(vp_stage: int | None) -> bool:
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    args = get_args()
    # Packed samples carry the bounds of documents, which every stage needs.
    if args.sft or is_first_or_last_pipeline_stage(vp_stage):
        return True
    return _has_mtp(core_transformer_config_from_args(args), vp_stage)


def _dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    settings = {
        # Most fields have the names of the arguments.
        **{
            field.name: getattr(args, field.name)
            for field in dataclasses.fields(GPTDatasetConfig)
            if field.init and hasattr(args, field.name)
        },
        "tokenizer": build_tokenizer(args),
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "inter_document_masking": args.dataloader_inter_document_masking,
        "path_to_cache": args.data_cache_path,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        # Packed samples are padded to a multiple of it.
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    return GPTDatasetConfig(**settings)
