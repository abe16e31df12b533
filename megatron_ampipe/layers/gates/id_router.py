"""The base class of routers that choose by the ids of tokens. Megatron gives a router hidden states alone."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Module

from megatron_ampipe.layers.token_ids import TokenIds


class TokenIdRouter(TopKRouter):
    """A router that reads ``self.token_ids``. Comes before other bases, such as ``ScoredRouter``."""

    token_ids: Tensor | None = None
    """``[R, B]`` int64, the ids of the rows that ``forward`` is given; None outside of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.id_source = TokenIds()
        """Of the model; one that was never told ids until :func:`give_token_ids`."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As in Megatron, with ``token_ids`` set; :class:`~..router.ChunkRouting` sets those of a chunk.

        Args:
            input: ``[R, B, D]``.
            args: Arguments of the stock router.
            kwargs: Likewise.

        Raises:
            BadInput: the model was not given ids.
        """
        routed: tuple[Tensor, Tensor]
        if self.token_ids is not None:
            routed = super().forward(input, *args, **kwargs)
            return routed
        is_spread = self.config.sequence_parallel
        self.token_ids = self.id_source.rows_of_rank(
            *input.shape[:2],
            ranks=self.tp_group.size() if is_spread else 1,
            rank=self.tp_group.rank() if is_spread else 0,
        )
        try:
            routed = super().forward(input, *args, **kwargs)
        finally:
            self.token_ids = None
        return routed


def give_token_ids(model: Module) -> TokenIds:
    """Let the routers in a module that read ids share one source.

    Args:
        model: A model of Megatron, or some of its layers.

    Returns:
        The source, which still has to be told ids: by :meth:`TokenIds.watch` or :meth:`TokenIds.keep`.
    """
    source = TokenIds(getattr(model, "vocab_size", None))
    for module in model.modules():
        if isinstance(module, TokenIdRouter):
            module.id_source = source
    return source
