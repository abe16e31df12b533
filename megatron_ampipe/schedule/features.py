"""What a block contains, as far as its stages depend on it. Pure data, read by :mod:`.kinds`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from megatron_ampipe.schedule.stage_kind import StageKind


class Restored(StrEnum):
    """How the backward pass of the experts gets what their forward pass has not kept."""

    REBUILD = "rebuild"
    """Inner tensors are computed once more."""
    REDISPATCH = "redispatch"
    """Tokens are sent once more."""
    OFFLOAD = "offload"
    """Inner tensors wait in host memory."""
    OFFLOAD_TOKENS = "offload_tokens"
    """What has arrived waits in host memory."""


@dataclass(frozen=True, slots=True)
class BlockFeatures:
    """What a block contains besides attention.

    Attributes:
        dense: An MLP in place of routed experts.
        losses: The router has auxiliary or z losses.
        shared: There are shared experts.
        ordered_routing: Chunks must be routed from first to last, because an expert's capacity that
            one chunk uses is gone for the next.
        chooses: The router chooses for all chunks at once.
        chunked_qkv: A chunk's queries, keys and values need the chunk's own rows alone, so that they
            can be projected chunk by chunk. Attention as a whole still takes them as a whole.
        recomputed: The forward pass keeps only what the block is given, and its stages run again in the
            backward pass (:attr:`Stage.again <.types.Stage.again>`).
        restored: What is not kept for the backward pass of the experts, and is restored in it: of each chunk
            of the backward pass, or once for all.
        condensed: Similar tokens are sent once.
        flex: The dispatcher counts the tokens itself, in the same call that sends them.
        reduces: Its backward pass reduces gradients of parameters over data-parallel ranks, as a stage.
        reduces_experts: Also those of its experts, which several ranks have, in a separate stage.
        nodes: Tokens are sent between nodes and then handed on inside one.
        gathers: The lane in which ranks that share an expert gather its tokens, and reduce and scatter what
            it gives; empty where experts are whole, or the dispatch gathers. With :attr:`nodes`, it is
            always that of the node.
        row_links: The resource (``Lane.resource``) over which tensor-parallel ranks add and scatter the rows
            that attention projects; empty where the projection does that itself.
        gathers_rows: With :attr:`row_links`, these ranks also gather what attention is given as a stage.
        ring_ranks: Context-parallel ranks that pass keys on to one another; 1 where none do.
        latent: ``merge`` projects what the experts return, so its backward needs their values.
        added: Kinds of stages beyond the table's; each names the row that it follows.
    """

    dense: bool = False
    losses: bool = False
    shared: bool = False
    ordered_routing: bool = False
    chooses: bool = False
    chunked_qkv: bool = False
    recomputed: bool = False
    restored: tuple[tuple[Restored, ...], ...] = ()
    condensed: bool = False
    flex: bool = False
    reduces: bool = False
    reduces_experts: bool = False
    nodes: bool = False
    gathers: str = ""
    row_links: str = ""
    gathers_rows: bool = False
    ring_ranks: int = 1
    latent: bool = False
    added: tuple[StageKind, ...] = ()

    @property
    def experts(self) -> bool:
        """Whether tokens are routed to experts."""
        return not self.dense

    @property
    def ring(self) -> bool:
        """Whether ranks pass keys on to one another."""
        return self.ring_ranks > 1

    def restores(self, what: Restored) -> bool:
        """Whether this is restored of any chunk."""
        return any(what in of_chunk for of_chunk in self.restored)

    @property
    def resort(self) -> bool:
        """Whether inner tensors come from host memory, and what arrives from another rank, of any chunk."""
        return any(Restored.OFFLOAD in one and Restored.REDISPATCH in one for one in self.restored)

    def of_chunk(self, chunk: int, degree: int | None = None) -> BlockFeatures:
        """With what is restored of one chunk.

        Args:
            chunk: Its index.
            degree: Of the pass that it is a chunk of; of the backward pass if None. A chunk of a forward pass
                with fewer chunks has what is restored of any of its parts.
        """
        count = len(self.restored)
        if count <= 1:
            return self
        degree = count if degree is None else degree
        first, end = chunk * count // degree, -(-(chunk + 1) * count // degree)
        return replace(self, restored=self.restored[first:end])

    @property
    def scatters_rows(self) -> bool:
        """Whether tensor-parallel ranks add and scatter what attention projects, as a stage."""
        return bool(self.row_links)
