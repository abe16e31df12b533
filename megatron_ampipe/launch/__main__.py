"""A checkout's own script: ``torchrun ... -m megatron_ampipe.launch PATH/pretrain_gpt.py <its flags>``."""

import sys

from megatron_ampipe.launch.script import main

if __name__ == "__main__":
    sys.exit(main())
