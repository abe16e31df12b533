"""What every stage of a Megatron MoE block computes: the functions of its kinds, and the state of one pass.

Functions are in :mod:`.attention_stages` and :mod:`.moe_stages`, or of added stages. The compiler of tapes
(``runtime.compile``) looks them up once, the state is made for every forward call by :mod:`.pipelined_block`.

Both halves enter a module with parameters by calling it, never by one of its methods: Megatron's forward
hooks wait for the parameters under ``--overlap-param-gather``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Parameter

from megatron_ampipe.layers import attention_stages, moe_stages
from megatron_ampipe.layers.attention_stages import AttentionStages
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.linear_weights import weights_apart
from megatron_ampipe.layers.moe_stages import MoEStages
from megatron_ampipe.layers.recompute import RandomStates
from megatron_ampipe.runtime.block_functions import AddedStage, Function
from megatron_ampipe.runtime.segment import WeightProducts
from megatron_ampipe.schedule import StageKind, kinds

ATTENTION, MOE = range(2)
"""The halves of a block, by number."""


class MegatronState:
    """The state of one pass of one micro-batch through a block; see ``runtime.block_functions.BlockState``.

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
    """The functions of the stages of a block; see ``runtime.block_functions.BlockFunctions``.

    Args:
        modules: What they call.
        added: Stages beyond those of the table.
    """

    def __init__(self, modules: BlockModules, added: Sequence[AddedStage] = ()) -> None:
        self._modules = modules
        self._added = {stage.kind: stage for stage in added}
        self.recomputed = modules.recomputed_stages
        self.stage_parameters: Mapping[StageKind, Sequence[Parameter]] = modules.stage_parameters
        self.all_parameters = modules.parameters.all

    def compute(self, kind: StageKind) -> tuple[int, Function]:
        """See ``BlockFunctions``."""
        if kind in self._added:
            return ATTENTION, _without_state(self._added[kind].compute, kind)
        half, function = _of_half(kind, attention_stages.COMPUTE, moe_stages.COMPUTE)
        if kind.step_of is not None:
            return half, _of_step(function, kind.step)
        return half, function

    def differentiate(self, kind: StageKind) -> tuple[int, Function]:
        """See ``BlockFunctions``."""
        assert kind.row == kinds.ATTEND
        return ATTENTION, _of_step(AttentionStages.attend_backward, kind.step)

    def communicate(self, kind: StageKind) -> tuple[int, Function]:
        """See ``BlockFunctions``."""
        if kind in self._added:
            return ATTENTION, _without_state(self._added[kind].communicate, kind)
        return _of_half(kind, attention_stages.COMMUNICATE, moe_stages.COMMUNICATE)

    def weights_apart(self, kind: StageKind, products: WeightProducts) -> AbstractContextManager[None]:
        """See ``BlockFunctions``."""
        return weights_apart(self._modules.linears[kind], products)


def _of_half(
    kind: StageKind, of_attention: Mapping[StageKind, Function], of_moe: Mapping[StageKind, Function]
) -> tuple[int, Function]:
    """The half that a kind belongs to, and its function."""
    if kind.row in of_attention:
        return ATTENTION, of_attention[kind.row]
    return MOE, of_moe[kind.row]


def _of_step(function: Function, step: int) -> Function:
    """A function of all steps of a kind as that of one step."""

    @functools.wraps(function)
    def run(state: Any, *args: Any) -> Any:
        return function(state, step, *args)

    return run


def _without_state(function: Callable[..., Any] | None, kind: StageKind) -> Function:
    """The function of an added stage, which has no state."""
    assert function is not None, f"{kind} lacks a function for its lane"

    def run(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run
