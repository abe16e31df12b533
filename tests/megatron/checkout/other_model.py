"""Trains a model other than GPT with Megatron's loop of 0.18; the launcher must refuse it."""

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args


class Line(MegatronModule):
    def __init__(self, config):
        super().__init__(config)
        self.weights = torch.nn.Linear(2, 2)

    def set_input_tensor(self, tensor):
        pass


def build_model(pre_process=True, post_process=True, **_):
    return Line(core_transformer_config_from_args(get_args()))


if __name__ == "__main__":
    settings = pretrain_cfg_container_from_args(parse_and_validate_args())
    pretrain(settings, None, build_model, ModelType.encoder_or_decoder, None)
