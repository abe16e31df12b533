"""Several training runs, one after another, on the same ranks; Megatron's globals are reset in between.

Each runs the complete entry point, or the launcher if its first word is a script. The arguments are the runs
as JSON (names, each with its command line) and the name of stand-ins, as
:func:`tests.megatron.launcher.runs_of` gives them.
"""

import json
import sys

from megatron_ampipe.launch import pretrain, script
from tests.megatron.launcher import BEGINS
from tests.megatron.stand_ins import STAND_INS


def main() -> int:
    """Train until a run fails; returns the exit code of the last run."""
    from megatron.core.datasets import utils
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTLowLevelDataset
    from megatron.core.distributed import DistributedDataParallel
    from megatron.training import training

    def replaced() -> tuple[object, ...]:
        of_training = (training.train_step, training.training_log, DistributedDataParallel.__init__)
        return (*of_training, GPTDataset._get_num_tokens_per_epoch, utils.compile_helpers)

    # Otherwise each training shuffles millions of sequences, of which it reads a dozen.
    MockGPTLowLevelDataset.size = 1000
    stock = replaced()
    # A training replaces sys.argv.
    lines, stand_ins = sys.argv[1:]
    for name, words in json.loads(lines):
        print(f"\n{BEGINS}{name}", flush=True)
        with STAND_INS[stand_ins]():
            code = (script if words[0].endswith(".py") else pretrain).main(words)
        if code != 0:
            return code
        assert replaced() == stock, "given back to Megatron"
        from megatron.training.training import destroy_global_state

        from tests.dist import logged_losses

        destroy_global_state()
        # Megatron keeps them for as many layers as the first model has.
        logged_losses.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main())
