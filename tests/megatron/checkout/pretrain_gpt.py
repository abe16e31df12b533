"""Trains a GPT model with the calls of Megatron-LM's ``pretrain_gpt.py``, for any supported version.

Does not use AMPipe. Supports what the tests launch: complete sequences, no tensor or context parallelism.
Copied next to a ``megatron`` folder by :mod:`.layout`.
"""

import functools

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training import arguments as megatron_arguments
from megatron.training import get_args, inprocess_restart, pretrain
from megatron.training.arguments import core_transformer_config_from_args

try:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
except ImportError:
    from megatron.training.global_vars import get_tokenizer

    def build_tokenizer(args):
        return get_tokenizer()


DEFAULTS = {"tokenizer_type": "NullTokenizer"}


def datasets(sizes, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


datasets.is_distributed = True


def build_model(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """Before 0.19."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    layers = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        vp_stage=vp_stage,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def loss(mask, losses):
    total = (losses.view(-1).float() * mask.view(-1)).sum()
    count = mask.sum().detach().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}


def forward_step(data, model):
    batch = {name: value.cuda() for name, value in next(data).items() if torch.is_tensor(value)}
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return losses, functools.partial(loss, batch["loss_mask"].float())


def add_own_flags(parser):
    parser.add_argument("--greeting", nargs="+", default=[])
    return parser


def main():
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    rest = (ModelType.encoder_or_decoder, forward_step)
    own = {"extra_args_provider": add_own_flags, "args_defaults": DEFAULTS}
    if not hasattr(megatron_arguments, "parse_and_validate_args"):
        # In 0.17 the loop parses the arguments.
        run(datasets, build_model, *rest, **own, store=store)
        return
    from megatron.training import argument_utils

    args = megatron_arguments.parse_and_validate_args(**own)
    print(*args.greeting)
    if hasattr(argument_utils, "gpt_config_from_args"):
        # In 0.19 the loop builds the model from its configuration.
        model = argument_utils.gpt_config_from_args(args)
        run(argument_utils.pretrain_cfg_container_from_args(args, model), datasets, *rest, store=store)
    else:
        run(argument_utils.pretrain_cfg_container_from_args(args), datasets, build_model, *rest, store=store)


if __name__ == "__main__":
    main()
