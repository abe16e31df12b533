"""A rank of pretraining on a CPU whose CUDA graphs are recorded; in the end it says how many it replayed."""

import sys

from megatron_ampipe.launch import host
from megatron_ampipe.launch.pretrain import main
from tests import cuda_graph_standin

if __name__ == "__main__":
    host.install()
    host.SUPPORTED_VALUES["--cuda-graph-impl"] = ("local",)
    with cuda_graph_standin.stand_ins():
        code = main(sys.argv[1:])
    print(f"replays: {len(cuda_graph_standin.REPLAYS)}")
    sys.exit(code)
