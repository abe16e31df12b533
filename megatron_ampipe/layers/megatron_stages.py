"""What every stage of a Megatron MoE block computes: one object per forward call.

Implements ``runtime.block_stages.BlockStages`` on the modules of a block: finds the function of a kind in
:mod:`.attention_stages` or :mod:`.moe_stages`, or among the added stages, and lets a second run draw the same
random numbers. Made by :mod:`.pipelined_block`, called by the runtime.

Both halves enter a module with parameters by calling it, never by one of its methods: Megatron's forward
hooks wait for the parameters under ``--overlap-param-gather``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.layers import attention_stages, moe_stages
from megatron_ampipe.layers.attention_stages import AttentionStages
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.linear_weights import weights_apart
from megatron_ampipe.layers.moe_stages import MoEStages
from megatron_ampipe.layers.recompute import RandomStates
from megatron_ampipe.runtime.block_stages import (
    AddedStage,
    BackwardFunction,
    CommunicationFunction,
    ComputeFunction,
)
from megatron_ampipe.runtime.weight_products import WeightProducts
from megatron_ampipe.schedule import Chunk, StageKind, kinds


class MegatronStages:
    """The stages of one pass of one micro-batch through a block.

    Args:
        modules: What is called.
        chunks: Where the sequence is cut.
        attention: The stages of the attention half.
        moe: The stages of the MoE half.
        added: Stages beyond those of the table.
        random: Keeps the random states of the stages, for :meth:`again`; None where no number is drawn twice.
    """

    def __init__(
        self,
        modules: BlockModules,
        *,
        chunks: Sequence[Chunk],
        attention: AttentionStages,
        moe: MoEStages,
        added: Sequence[AddedStage] = (),
        random: RandomStates | None = None,
    ) -> None:
        self.chunks = chunks
        self._modules, self._attention, self._moe = modules, attention, moe
        self._random, self._is_again = random, False
        self.recomputed = modules.recomputed_stages
        self.parameters: Mapping[StageKind, Sequence[Parameter]] = modules.stage_parameters
        self._added = {stage.kind: stage for stage in added}

    def again(self) -> MegatronStages:
        """See ``BlockStages``."""
        found = copy.copy(self)
        found._is_again = True
        found._attention, found._moe = self._attention.again(), self._moe.again()
        return found

    # Bound methods are made when they are asked for: kept here, they would be a cycle that holds activations.

    def compute(self, kind: StageKind) -> ComputeFunction:
        """See ``BlockStages``."""
        if kind in self._added:
            function = self._added[kind].compute
            assert function is not None, f"{kind} is not computed"
        else:
            function = self._of_half(kind, attention_stages.COMPUTE, moe_stages.COMPUTE)
            if kind.step_of is not None:
                function = functools.partial(function, kind.step)
        return function if self._random is None else functools.partial(self._draw, kind, function)

    def differentiate(self, kind: StageKind) -> BackwardFunction:
        """See ``BlockStages``."""
        assert kind.row == kinds.ATTEND
        return functools.partial(self._attention.attend_backward, kind.step)

    def weights_apart(self, kind: StageKind, products: WeightProducts) -> AbstractContextManager[None]:
        """See ``BlockStages``."""
        return weights_apart(self._modules.linears[kind], products)

    def _draw(
        self, kind: StageKind, function: ComputeFunction, chunk: int | None, *tensors: Tensor, **extra: Any
    ) -> tuple[Tensor, ...]:
        """Run a function so that a second run draws the random numbers of the first."""
        assert self._random is not None
        if not self._is_again:
            self._random.record((kind, chunk))
            return function(chunk, *tensors, **extra)
        with self._random.restored((kind, chunk)):
            return function(chunk, *tensors, **extra)

    def communicate(self, kind: StageKind) -> CommunicationFunction:
        """See ``BlockStages``."""
        if kind in self._added:
            function = self._added[kind].communicate
            assert function is not None, f"{kind} is computed"
            return function
        return self._of_half(kind, attention_stages.COMMUNICATE, moe_stages.COMMUNICATE)

    def _of_half(
        self,
        kind: StageKind,
        of_attention: Mapping[StageKind, Callable[..., Any]],
        of_moe: Mapping[StageKind, Callable[..., Any]],
    ) -> Callable[..., Any]:
        """The function of a kind, with the half that it belongs to."""
        if kind.row in of_attention:
            return functools.partial(of_attention[kind.row], self._attention)
        return functools.partial(of_moe[kind.row], self._moe)
