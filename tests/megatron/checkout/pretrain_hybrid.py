"""Trains a hybrid model with the calls of Megatron-LM's ``pretrain_hybrid.py``, from 0.19 on.

Does not use AMPipe. Copied next to ``pretrain_gpt.py`` by :mod:`.layout`, which has data and forward step.
"""

from megatron.core.enums import ModelType
from megatron.training import inprocess_restart, pretrain
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from pretrain_gpt import DEFAULTS, datasets, forward_step

if __name__ == "__main__":
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(args_defaults=DEFAULTS)
    settings = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))
    run(settings, datasets, ModelType.encoder_or_decoder, forward_step, store=store)
