"""State shared by all pipelined layers of a process. ``launch`` creates it; layer specifications carry it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_ampipe.block.settings import Settings
from megatron_ampipe.errors import BadInput
from megatron_ampipe.exchange.codecs import Condenser, Wire
from megatron_ampipe.exchange.fixed_rows import FixedRows
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.partners import Partners
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.schedule import KEEP, Pipeline
from megatron_ampipe.schedule.chunks import Documents
from megatron_ampipe.schedule.pipeline import builds_layers


class DocumentReader:
    """Reads the bounds of documents from the arguments of a layer, once per micro-batch for all layers.

    A packed micro-batch (``--sft``, ``--dataloader-inter-document-masking``) comes with the bounds of its
    documents; ``refused``, if given, is raised for it. With ``--reset-attention-mask`` the data loader makes
    a mask, which is read if ``masked``.
    """

    def __init__(self, *, masked: bool = False, refused: BadInput | None = None) -> None:
        self._masked, self._refused = masked, refused
        self._last: weakref.ref[PackedSeqParams | Tensor] | None = None
        self._documents: Documents | None = None

    def read(
        self, packing: PackedSeqParams | None, mask: Tensor | None, *, num_rows: int, ranks: int = 1
    ) -> Documents | None:
        """The documents of a micro-batch; None if a row may attend to all earlier rows of its sequence.

        Waits for the device once per micro-batch. ``mask [B or 1, 1, S, S]`` is bool, True where a row must
        not attend to a key. ``num_rows`` counts the rows of all packed sequences together, over all
        ``ranks`` of sequence parallelism.
        """
        if packing is not None and self._refused is not None:
            raise self._refused
        source = packing if packing is not None else mask if self._masked else None
        if source is None:
            return None
        if self._last is None or self._last() is not source:
            if isinstance(source, Tensor):
                self._documents = _masked_documents(source)
            else:
                self._documents = _packed_documents(source, num_rows, ranks=ranks)
            self._last = weakref.ref(source)
        return self._documents


def _packed_documents(packing: PackedSeqParams, num_rows: int, *, ranks: int) -> Documents:
    """The documents of a packed micro-batch of ``num_rows`` rows.

    It holds several sequences one after another. Megatron's MoE layers treat the sequences on a rank as the
    batch (``TransformerLayer._maybe_unflatten_for_moe``): the first sequences of all ranks are one sequence
    here, the second ones the next. If a rank holds less than two sequences, all rows are one sequence.
    """
    assert packing.qkv_format == "thd", f"an unknown packed format {packing.qkv_format}"
    padded, bounds = packing.cu_seqlens_q_padded, packing.cu_seqlens_q
    assert bounds is not None
    *firsts, end = sorted(set((bounds if padded is None else padded).tolist()))
    assert firsts[0] == 0 and end == num_rows, f"documents {firsts} to {end} of {num_rows} rows"
    rows_per_rank = num_rows // ranks
    length = packing.tokens_per_sample or rows_per_rank
    if length > rows_per_rank or rows_per_rank % length:
        length = rows_per_rank
    starts: list[list[int]] = [[] for _ in range(rows_per_rank // length)]
    for start in firsts:
        rank, row = divmod(start, rows_per_rank)
        sequence, row = divmod(row, length)
        starts[sequence].append(rank * length + row)
    return Documents(tuple(map(tuple, starts)), length * ranks, own_positions=True)


def _masked_documents(mask: Tensor) -> Documents:
    """The documents that a mask separates: a row that does not see the row before it begins a document."""
    begins = mask[:, 0].diagonal(offset=-1, dim1=1, dim2=2).cpu()
    starts = tuple((0, *(rows.nonzero().flatten() + 1).tolist()) for rows in begins)
    return Documents(starts, mask.shape[-1], own_positions=False)


@dataclass(slots=True)
class AMPipeContext:
    """Settings, executor and recorder of a process.

    Attributes:
        settings: The values of the flags ``--ampipe-*``.
        given: How blocks run at first.
        executor: Runs the stages; if None, the first layer that runs creates it.
        kernel: Name of the attention kernel; if None, each layer chooses.
        recomputed_layers: Full recompute inside the schedules: how many layers of a (virtual) pipeline stage,
            from its first, save only their input; infinity for all layers, also of multi-token prediction.
            0 otherwise.
        reductions: Gradient reductions that run as stages of the backward pass; None where data parallelism
            starts them itself.
        shares: Whether layers can share a schedule; False if a setting outside the layer config forbids it.
        partners: Joins the passes of two micro-batches (``--ampipe-partner``); None without.
        gate: The router class of ``--ampipe-router``; None for Megatron's own.
        wire: Encodes tokens for their transfers (``--ampipe-wire``); None to send them as they are.
        graph_modules: The values of Megatron's ``--cuda-graph-modules`` whose stages are captured.
        graph_warm_up: How many micro-batches run without graphs first.
        fixed_rows: The chunks that are sent with fixed rows (``--ampipe-rows fixed``); None for exact rows.
        condenser: Chooses which of similar tokens are sent (``--ampipe-condense``); None to send all.
        pipeline: How blocks run from the next forward pass on; at first as in ``given``.
        predicted_ms: The predicted times of a block's forward and backward pass, from a plan; only logged.
        run_being_built: The ``LayerRun`` of the layer that was built last.
    """

    settings: Settings
    given: Pipeline
    recorder: Recorder = field(default_factory=Recorder)
    executor: Executor | None = None
    kernel: str | None = None
    recomputed_layers: float = 0
    documents: DocumentReader = field(default_factory=DocumentReader)
    reductions: Reductions | None = None
    shares: bool = True
    partners: Partners | None = None
    gate: type | None = None
    wire: Wire | None = None
    graph_modules: frozenset[str] = frozenset()
    graph_warm_up: int = 3
    fixed_rows: FixedRows | None = None
    condenser: Condenser | None = field(init=False, default=None)
    pipeline: Pipeline = field(init=False)
    predicted_ms: tuple[float, float] | None = field(init=False, default=None)
    run_being_built: object = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        self.pipeline = self.given
        if self.settings.condense is not None:
            self.condenser = Condenser(self.settings.condense)

    @property
    def pipelined(self) -> bool:
        """Whether AMPipe's MoE layers are built rather than Megatron's own."""
        return builds_layers(self.settings, self.given)

    @property
    def runs_megatron_layers(self) -> bool:
        """Whether blocks run as Megatron's own layers at present, because a schedule would change nothing."""
        # A custom gate may give a token any number of experts, which Megatron's layer does not support.
        changes = self.gate, self.reductions, self.wire, self.condenser, self.partners
        return (
            self.pipeline.is_stock
            and self.pipeline.memory == KEEP
            and all(change is None for change in changes)
        )

    def __deepcopy__(self, memo: dict[int, object]) -> AMPipeContext:
        """Return the same object: Megatron deep-copies layer specifications, but the context is shared."""
        return self
