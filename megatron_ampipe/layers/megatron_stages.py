"""What every stage of a Megatron MoE block computes: the functions of its kinds, and the state of one pass.

Functions are in :mod:`.attention_stages` and :mod:`.moe_stages`. The compiler of tapes
(``runtime.compile``) looks them up once, the state is made for every forward call by :mod:`.pipelined_block`.

Both halves enter a module with parameters by calling it, never by one of its methods: Megatron's forward
hooks wait for the parameters under ``--overlap-param-gather``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Parameter

from megatron_ampipe.layers.attention_stages import AttentionStages
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.linear_weights import weights_apart
from megatron_ampipe.layers.moe_stages import MoEStages
from megatron_ampipe.layers.recompute import RandomStates
from megatron_ampipe.layers.stage_functions import BACKWARDS, FUNCTIONS, StageFunction
from megatron_ampipe.runtime.steps import Function
from megatron_ampipe.runtime.weight_products import WeightProducts
from megatron_ampipe.schedule import StageKind


class MegatronState:
    """The state of one pass of one micro-batch through a block; see ``runtime.pass_state.BlockState``.

    Args:
        attention: Of the attention half.
        moe: Of the MoE half.
        draws: Keeps the random states of the stages, for :meth:`again`; None where no number is drawn twice.
    """

    def __init__(self, attention: AttentionStages, moe: MoEStages, draws: RandomStates | None) -> None:
        self.halves, self.draws = (attention, moe), draws

    def again(self) -> MegatronState:
        """See ``BlockState``."""
        attention, moe = self.halves
        return MegatronState(attention.again(), moe.again(), self.draws)


class MegatronFunctions:
    """The functions of the stages of a block; see ``runtime.block_layout.BlockFunctions``.

    Args:
        modules: What they call.
    """

    def __init__(self, modules: BlockModules) -> None:
        self._modules = modules
        self.recomputed = modules.recomputed_stages
        self.stage_parameters: Mapping[StageKind, Sequence[Parameter]] = modules.stage_parameters
        self.all_parameters = modules.parameters.all

    def run(self, kind: StageKind) -> tuple[int, Function]:
        """See ``BlockFunctions``."""
        return _bound(FUNCTIONS[kind.row], kind)

    def differentiate(self, kind: StageKind) -> tuple[int, Function]:
        """See ``BlockFunctions``."""
        return _bound(BACKWARDS[kind.row], kind)

    def weights_apart(self, kind: StageKind, products: WeightProducts) -> AbstractContextManager[None]:
        """See ``BlockFunctions``."""
        return weights_apart(self._modules.linears[kind], products)


def _bound(function: StageFunction, kind: StageKind) -> tuple[int, Function]:
    """The half of a function, and the function; what computes all steps of a kind as that of one step."""
    if kind.step_of is None or not kind.lane.computes:
        return function.half, function.run
    of_steps, step = function.run, kind.step

    @functools.wraps(of_steps)
    def run(state: Any, *args: Any) -> Any:
        return of_steps(state, step, *args)

    return function.half, run
