"""Routers that choose by the ids of tokens: their base class, and where the ids come from.

Megatron gives ids to a model and hidden states to its routers. Hooks of the model keep the ids of its current
micro-batch, without any change to what its layers are called with.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Module

from megatron_ampipe.errors import BadInput

# S sequence rows of this rank, R rows of a chunk, B batch.


class TokenIds:
    """The ids of the micro-batch that one model, or one virtual stage of it, runs at present.

    In a forward pass, the model is given them. A recompute reads them in the backward pass, when the model
    has run other micro-batches. So the gradient of the model's output, with which every backward pass begins,
    puts the ids back that belong to that output.

    Args:
        vocabulary: All ids are below it, if it is known.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        self.vocabulary = vocabulary
        self._current: Tensor | None = None

    def keep(self, ids: Tensor | None) -> None:
        """From now on, a micro-batch with these ids runs: ``[B, S]`` of this context-parallel rank; of a
        packed micro-batch ``[1, B * S]``."""
        self._current = ids

    def watch(self, model: Module) -> None:
        """Keep the ``input_ids`` that a GPT or hybrid model of Megatron, without wrappers, is called with."""
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    def _before(self, model: Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.keep(inputs[0] if inputs else options.get("input_ids"))

    def _after(self, model: Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            ids = self._current
            output.register_hook(lambda gradient: self.keep(ids))

    def rows(self, num_rows: int, batch: int, *, ranks: int = 1) -> Tensor:
        """The ids of all rows that the tensor-parallel ranks hold, in the order of the ranks.

        Args:
            num_rows: Rows of one rank.
            batch: Sequences side by side in the hidden states.
            ranks: Over how many ranks sequence parallelism spreads the rows.

        Returns:
            ``[num_rows * ranks, B]``, int64.

        Raises:
            BadInput: the model was not given ids.
        """
        ids = self._current
        if ids is None:
            raise BadInput(
                "--ampipe-router",
                "(reads token ids)",
                rule="the model was called without input_ids",
                remedy="Train with -m megatron_ampipe.pretrain_gpt, or use a router that reads hidden "
                "states, such as --ampipe-router cosine.",
            )
        assert ids.numel() == num_rows * ranks * batch, (
            f"{tuple(ids.shape)} ids of {num_rows} rows on {ranks} ranks, {batch} sequences"
        )
        if ids.shape[0] == batch:
            return ids.t()
        # Packed: TransformerLayer._maybe_unflatten_for_moe cuts the rows of a rank into sequences.
        return ids.view(ranks, batch, num_rows).transpose(1, 2).reshape(-1, batch)

    def rows_of_rank(self, num_rows: int, batch: int, *, ranks: int, rank: int) -> Tensor:
        """The ids of the rows of one of the ranks, ``[num_rows, B]``; see :meth:`rows`."""
        return self.rows(num_rows, batch, ranks=ranks)[rank * num_rows :][:num_rows]


class TokenIdRouter(TopKRouter):
    """A router that reads ``self.token_ids``. Comes before other bases, such as ``ScoredRouter``."""

    token_ids: Tensor | None = None
    """``[R, B]`` int64, the ids of the rows that ``forward`` is given; None outside of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.id_source = TokenIds()
        """Of the model; one that was never told ids until :func:`give_token_ids`."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As in Megatron for ``[R, B, D]``, with ``token_ids`` set (by ``ChunkRouting`` if of a chunk).

        Raises:
            BadInput: the model was not given ids.
        """
        if self.token_ids is not None:
            return super().forward(input, *args, **kwargs)
        is_spread = self.config.sequence_parallel
        self.token_ids = self.id_source.rows_of_rank(
            *input.shape[:2],
            ranks=self.tp_group.size() if is_spread else 1,
            rank=self.tp_group.rank() if is_spread else 0,
        )
        try:
            return super().forward(input, *args, **kwargs)
        finally:
            self.token_ids = None


def give_token_ids(model: Module) -> TokenIds:
    """Let the routers that read ids in a model of Megatron, or in some of its layers, share one source.

    The source still has to be told ids: by :meth:`TokenIds.watch` or :meth:`TokenIds.keep`.
    """
    source = TokenIds(getattr(model, "vocab_size", None))
    for module in model.modules():
        if isinstance(module, TokenIdRouter):
            module.id_source = source
    return source
