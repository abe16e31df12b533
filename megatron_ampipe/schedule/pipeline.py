"""How blocks run: chunks of the sequence, order of the stages, exchange of tokens, and saved activations.

``--ampipe-exchange`` says how the all-to-all groups copies of a token; what experts save is in :mod:`.saved`.

A :class:`Pipeline` is the only type that stores degrees and shares. It is created from flags, plans and
benchmark grids; ``--ampipe-degree auto`` replaces it between two iterations; blocks read it from
``layers.context``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

from megatron_ampipe.block.megatron_settings import LayoutSettings, MegatronSettings
from megatron_ampipe.block.settings import AUTO, SETTING, Settings
from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.chunks import Chunk, SequenceLayout, chunk_sequence
from megatron_ampipe.schedule.features import BlockFeatures, expert_tensor_ranks
from megatron_ampipe.schedule.kinds import QKV
from megatron_ampipe.schedule.orders import SCHEDULE_NAMES, build
from megatron_ampipe.schedule.partners import Partner, in_order_of
from megatron_ampipe.schedule.passes import period, unrolled
from megatron_ampipe.schedule.program import Schedule
from megatron_ampipe.schedule.saved import KEEP, STRATEGIES, Saved, check_memory, chunk_strategies
from megatron_ampipe.schedule.stage_kind import Direction
from megatron_ampipe.schedule.text import check


class Exchange(StrEnum):
    """What the all-to-all of a chunk sends. All give the same result, up to the order of additions."""

    ROWS = "rows"
    """A row for each expert of a token, as in Megatron's dispatcher."""
    RANKS = "ranks"
    """A row for each rank that has experts of the token; the rank copies it and adds their outputs."""
    NODES = "nodes"
    """A row for each node that has experts of the token, sent to the rank of the same index in that node,
    which forwards it to the ranks of the experts, and adds the outputs that they return."""
    TWO_DIMENSIONAL = "2dh"
    """The rows of ``rows`` over the two hops of ``nodes``: fewer and larger messages between nodes, with the
    same number of bytes, and a second hop; as the 2D hierarchical all-to-all of Tutel and FSMoE."""

    @property
    def sends_every_copy(self) -> bool:
        """Whether there is a row for each expert of a token."""
        return self in (Exchange.ROWS, Exchange.TWO_DIMENSIONAL)

    @property
    def has_two_hops(self) -> bool:
        """Whether rows are sent between nodes first, and then forwarded within a node."""
        return self in (Exchange.NODES, Exchange.TWO_DIMENSIONAL)


def parse_exchanges(text: str, *, flag: str) -> tuple[Exchange, ...]:
    """Parse a comma-separated list of exchanges, or ``auto`` for all; raises :class:`BadInput`."""
    if text == AUTO:
        return tuple(Exchange)
    try:
        return tuple(dict.fromkeys(map(Exchange, text.split(","))))
    except ValueError:
        rule = f"is not {AUTO}, or a list of {', '.join(Exchange)}"
        raise BadInput(flag, text or "(empty)", rule=rule, remedy=f"Use {flag} rows,ranks.") from None


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """Number of nodes that a group of expert-parallel ranks is spread over, and of its ranks on each node.

    The ranks are ordered node by node.
    """

    num_nodes: int
    ranks_per_node: int

    @classmethod
    def of(cls, settings: LayoutSettings, ranks_per_node: int | None) -> NodeLayout | None:
        """The layout of Megatron's expert-parallel groups: expert-tensor-parallel ranks are adjacent.

        ``settings`` are as in :mod:`.features`; ``ranks_per_node`` is the number of all ranks on a node, or
        None if unknown. Returns None unless a group is spread equally over several nodes, with several of
        its ranks on each.
        """
        expert, expert_tensor = settings.expert_model_parallel_size, expert_tensor_ranks(settings)
        if ranks_per_node is None or ranks_per_node % expert_tensor:
            return None
        near = ranks_per_node // expert_tensor
        return cls(expert // near, near) if 1 < near < expert and expert % near == 0 else None


def useful_exchanges(
    settings: MegatronSettings, num_experts: int, ranks_per_node: int | None
) -> tuple[Exchange, ...]:
    """The exchanges worth trying: Megatron's own, and those with fewer copies or larger messages.

    Arguments are as in :meth:`NodeLayout.of`; ``num_experts`` is the number of all experts of a layer.
    """
    useful, copies = [Exchange.ROWS], settings.moe_router_topk > 1
    if settings.moe_token_dispatcher_type == "alltoall":
        expert = settings.expert_model_parallel_size
        if copies and expert * expert_tensor_ranks(settings) > 1 and num_experts > expert:
            useful.append(Exchange.RANKS)
        if NodeLayout.of(settings, ranks_per_node) is not None:
            useful += [Exchange.NODES] * copies + [Exchange.TWO_DIMENSIONAL]
    return tuple(useful)


def with_exchange(features: BlockFeatures, exchange: Exchange) -> BlockFeatures:
    """The features of a block that uses this exchange."""
    return features if features.dense else replace(features, nodes=exchange.has_two_hops)


def with_memory(features: BlockFeatures, memory: str) -> BlockFeatures:
    """The features of a block that trains with a memory strategy, which has no effect on a block without
    experts or with full recompute."""
    return features if features.dense else replace(features, saved=features.saved.with_memory(memory))


ALL_LAYERS = 0
"""The value of :attr:`Pipeline.stack` for all layers of a pipeline stage."""
_ALL = "all"


def parse_stack(text: str, *, flag: str) -> int:
    """Parse ``Pipeline.stack``: how many layers share a schedule, or ``all``; raises :class:`BadInput`."""
    if text == _ALL:
        return ALL_LAYERS
    # ``int`` fails for thousands of digits.
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        rule = f"must be a whole number of layers, at least 1, or {_ALL}"
        remedy = f"Use {flag} {_ALL}, or {flag} 1 to run layer by layer."
        raise BadInput(flag, text or "(empty)", rule=rule, remedy=remedy)
    return int(text)


def stack_to_text(stack: int) -> str:
    """The text that :func:`parse_stack` parses."""
    return str(stack) if stack else _ALL


def parse_shares(text: str, *, flag: str) -> tuple[float, ...]:
    """Parse shares, such as ``0.4,0.3,0.3``, and scale them to a sum of exactly 1; or :class:`BadInput`."""
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    total = sum(shares)
    # The tolerance lets 0.33,0.33,0.33 mean thirds. NaN is refused.
    if shares and all(share > 0 for share in shares) and abs(total - 1) <= 0.015:
        return tuple(share / total for share in shares)
    rule = "is not a list of numbers above 0 with a sum of 1, separated by commas"
    raise BadInput(flag, text or "(empty)", rule=rule, remedy=f"Use for example {flag} 0.4,0.3,0.3.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One way to run every block of a model.

    In the direction with the smaller degree, adjacent chunks are grouped: they are computed one after the
    other and share a collective.

    Attributes:
        degree: Number of chunks of the forward pass.
        backward_degree: Number of chunks of the backward pass; one of the two divides the other.
        shares: The share of each chunk in the sequence, with a sum of 1; or one share for each forward chunk
            that covers several backward chunks, which are then equal. None for equal chunks.
        schedule: Name of the schedule of blocks without an ``order``, or that an order without a name does
            not fit.
        order: A schedule that replaces the named one, with the same degrees: of one block, or one that
            repeats.
        stack: How many consecutive layers share a schedule: 1 is block by block, 0 all of a pipeline stage.
        memory: What the experts save for their backward: one of :data:`~.saved.STRATEGIES`, or
            one for each chunk of the backward pass (:func:`~.saved.chunk_strategies`).
        exchange: How the all-to-all groups copies of a token.
        partner: How passes with a partner run; None without ``--ampipe-partner``.
        partnered: Directions in which a micro-batch has a partner; set by :meth:`with_partners`.

    Raises:
        BadInput: a degree is invalid, or degrees and shares contradict each other.
    """

    degree: int
    backward_degree: int
    shares: tuple[float, ...] | None = None
    schedule: str = "ampipe"
    order: Schedule | None = None
    stack: int = 1
    memory: str = KEEP
    exchange: Exchange = Exchange.ROWS
    partner: Partner | None = None
    partnered: tuple[Direction, ...] = ()

    @classmethod
    def of(cls, degree: int, *, backward_degree: int | None = None, **others: Any) -> Self:
        """A pipeline whose backward degree defaults to the forward degree."""
        backward = degree if backward_degree is None else backward_degree
        return cls(degree=degree, backward_degree=backward, **others)

    def __post_init__(self) -> None:
        degree, backward = self.degree, self.backward_degree
        if degree < 1:
            rule = "must be a whole number of chunks, at least 1"
            remedy = "Use --ampipe-degree 2, or 1 for Megatron's own layers."
            raise BadInput("--ampipe-degree", degree, rule=rule, remedy=remedy)
        if backward < 1 or max(degree, backward) % min(degree, backward):
            rule = f"must be a divisor or a multiple of the degree of the forward pass ({degree})"
            remedy = f"Use --ampipe-backward-degree {2 * degree}, 1 or {degree}."
            raise BadInput("--ampipe-backward-degree", backward, rule=rule, remedy=remedy)
        if self.shares is not None and len(self.shares) not in (degree, self.num_chunks):
            rule = f"is not the number of shares of --ampipe-chunks ({len(self.shares)})"
            remedy = f"Leave it out: --ampipe-chunks implies --ampipe-degree {len(self.shares)}."
            raise BadInput("--ampipe-degree", degree, rule=rule, remedy=remedy)
        check_memory(self.memory, backward_degree=backward)
        together = 1 if self.partner is None else self.partner.degree
        if any(max(together, other) % min(together, other) for other in (degree, backward)):
            rule = f"must be a divisor or a multiple of the degree of the other passes ({self.num_chunks})"
            raise SETTING["partner_degree"].refuse(together, rule, "Leave it out: they are uncut then.")
        assert self.order is None or (self.order.degree, self.order.backward_degree) == (degree, backward)

    def trained(self, features: BlockFeatures) -> BlockFeatures:
        """Add exchange and memory strategy of this pipeline to the features of a block."""
        return with_memory(with_exchange(features, self.exchange), self.memory)

    @property
    def is_stock(self) -> bool:
        """Whether it does the same as Megatron's own layer: one chunk, its exchange, no overlap."""
        return not self.overlaps and self.exchange is Exchange.ROWS

    @property
    def overlaps(self) -> bool:
        """Whether transfers overlap with computation: of other chunks, or of weight gradients."""
        return self.num_chunks > 1 or self.splits_weights

    @property
    def splits_weights(self) -> bool:
        """Whether weight gradients are separate stages, which overlap even with one chunk."""
        return bool(self._any_order.backward.weights)

    @property
    def joins_weights(self) -> bool:
        """See ``Schedule.joins_weights``."""
        return self._any_order.joins_weights

    @property
    def whole_attention(self) -> bool:
        """Whether attention is computed for the whole sequence at once."""
        return self._any_order.whole_attention

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the sequence."""
        return max(self.degree, self.backward_degree)

    def chunks(self, sequence_length: int, layout: SequenceLayout | None = None) -> tuple[Chunk, ...]:
        """See :func:`~.chunks.chunk_sequence`."""
        shares = self.shares
        if shares is not None and len(shares) < self.num_chunks:
            parts = self.num_chunks // self.degree
            shares = tuple(share / parts for share in shares for _ in range(parts))
        return chunk_sequence(sequence_length, degree=self.num_chunks, shares=shares, layout=layout)

    def schedule_of(self, layers: Sequence[BlockFeatures]) -> Schedule:
        """The checked schedule of consecutive blocks with these features, which share it."""
        order = self.order
        # With tensor parallelism, only blocks that share a schedule project queries by chunk. Their order
        # does not fit a block that shares no schedule, such as an MTP layer.
        if order is not None and order.repeats and len(layers) == 1:
            order = order if layers[0].chunked_qkv or QKV in order.forward.whole else None
        if not layers[0].attention:
            order = None
        if order is None:
            # Builders only know blocks with experts; ``unrolled`` adds stages of dense blocks and recompute.
            block = next((block for block in layers if not block.dense), layers[0])
            order = self._named_order(replace(block, saved=block.saved._replace(block=Saved.KEEP)))
        schedule = unrolled(order if len(layers) == 1 else period(order), layers)
        if self.partner is not None:
            for direction in self.partnered:
                schedule = in_order_of(self.partner, schedule, layers, direction)
        check(schedule, layers)
        return schedule

    def with_partners(self, *, forward: bool, backward: bool) -> Pipeline:
        """The pipeline of a micro-batch whose passes in these directions have a partner."""
        partner = self.partner
        if partner is None or not (forward or backward):
            return self
        degree = partner.degree if forward else self.degree
        backward_degree = partner.degree if backward else self.backward_degree
        keeps_memory = backward_degree == self.backward_degree
        keeps_chunks = max(degree, backward_degree) == self.num_chunks
        return replace(
            self,
            degree=degree,
            backward_degree=backward_degree,
            shares=self.shares if keeps_chunks else None,
            schedule=partner.schedule,
            order=None,
            memory=self.memory if keeps_memory else chunk_strategies(self.memory)[0],
            partnered=(Direction.FORWARD,) * forward + (Direction.BACKWARD,) * backward,
        )

    def _named_order(self, features: BlockFeatures) -> Schedule:
        degrees = {"degree": self.degree, "backward_degree": self.backward_degree}
        # A block that an order does not fit runs the named schedule that the order is of, if there is one.
        order = self.order
        name = order.name if order is not None and order.name in SCHEDULE_NAMES else self.schedule
        return build(name, features=features, **degrees)

    @property
    def _any_order(self) -> Schedule:
        """The given order, or the named one for a typical block."""
        return self.order or self._named_order(BlockFeatures(chunked_qkv=True))

    def stack_of(self, num_layers: int) -> int:
        """The largest number of layers that share a schedule, among so many consecutive ones."""
        return min(self.stack, num_layers) if self.stack else num_layers

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self.order.name if self.order is not None else self.schedule

    @property
    def labels(self) -> dict[str, str]:
        """The labels of a timeline of this pipeline, recorded or predicted."""
        labels = {"degree": str(self.degree)}
        if self.backward_degree != self.degree:
            labels["backward degree"] = str(self.backward_degree)
        if self.shares is not None:
            labels["shares"] = " ".join(f"{share:.4g}" for share in self.shares)
        labels["schedule"] = self.name
        if self.stack != 1:
            labels["stack"] = stack_to_text(self.stack)
        if self.memory != KEEP:
            labels["memory"] = self.memory
        if self.exchange is not Exchange.ROWS:
            labels["exchange"] = self.exchange
        if self.partner is not None:
            labels["partner"] = str(self.partner)
        return labels

    @property
    def flags(self) -> list[str]:
        """The flags of a run with this pipeline, without defaults; an unnamed order has no flag."""
        values: dict[str, object] = {"degree": self.degree}
        if self.shares is not None:
            values = {"chunks": ",".join(f"{share:.4g}" for share in self.shares)}
        if self.backward_degree != self.degree:
            values["backward_degree"] = self.backward_degree
        if self.overlaps and (self.order is None or self.name in SCHEDULE_NAMES):
            values["schedule"] = self.name
        if self.overlaps or self.partner is not None:
            values["stack"] = stack_to_text(self.stack)
        values |= {"memory": self.memory, "exchange": self.exchange}
        if self.partner is not None:
            values["partner"] = True
            values |= {"partner_degree": self.partner.degree, "partner_order": self.partner.order}
        flags = []
        for name, value in values.items():
            if value != SETTING[name].default:
                flags += [SETTING[name].flag] if value is True else [SETTING[name].flag, str(value)]
        return flags

    def __str__(self) -> str:
        return ", ".join(f"{label} {value}" for label, value in self.labels.items())


def check_condense(settings: Settings, pipeline: Pipeline) -> None:
    """Raise :class:`BadInput` if blocks that run like this cannot leave out similar tokens."""
    if settings.condense is None:
        return
    setting, exchange, memory = SETTING["condense"], pipeline.exchange, pipeline.memory
    if not exchange.sends_every_copy:
        rule = f"with --ampipe-exchange {exchange}, a row is for several experts and returns their sum"
        remedy = f"Use --ampipe-exchange rows, or leave {setting.flag} out."
        raise setting.refuse(settings.condense, rule, remedy)
    if any(STRATEGIES[name].tokens is Saved.RESEND for name in chunk_strategies(memory)):
        rule = f"with --ampipe-memory {memory}, the similar tokens would have to be chosen again"
        remedy = f"Use --ampipe-memory rebuild, or leave {setting.flag} out."
        raise setting.refuse(settings.condense, rule, remedy)


def builds_layers(settings: Settings, pipeline: Pipeline) -> bool:
    """Whether AMPipe's MoE layers are built rather than Megatron's own."""
    return settings.automatic or pipeline.partner is not None or not pipeline.is_stock
