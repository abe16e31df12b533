"""GPT pretraining with AMPipe: ``torchrun ... -m megatron_ampipe.pretrain_gpt <Megatron flags>``."""

import sys

from megatron_ampipe.launch.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
