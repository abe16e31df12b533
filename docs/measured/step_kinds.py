"""The kinds of steps that :mod:`partners` times: their names, what each needs, what the tables call them.

Imports nothing of a package: the check of a GPU reads it before anything is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

MEGATRON = "megatron"
CONTROL = "control"
OVERLAP = "megatron, overlapped"
MEGATRON_GRAPHS = "megatron, CUDA graphs"
OVERLAP_GRAPHS = "megatron, overlapped, CUDA graphs"
MOE_ONLY = "moe-only, degree {}"
STACK = "stack, degree {}"
STACK_GRAPHS = "stack, degree {}, CUDA graphs"
STACK_WHOLE = "stack, degree {}, whole graphs"
"""Fixed rows, and whole passes as CUDA graphs."""
PARTNERS = "partners, megatron-1f1b"
PARTNERS_WHOLE = f"{PARTNERS}, whole graphs"
DEGREES = (2, 4)

GPU = "a GPU"
IN_16_BIT = "layers in 16 bit"
ENGINE = "layers of Transformer Engine"
LOCAL = "local layers"


@dataclass(frozen=True, slots=True)
class StepKind:
    """A row of the table.

    Attributes:
        name: In the raw file.
        title: In tables of the documentation.
        needs: Without one of these it is left out, and the raw file says why.
    """

    name: str
    title: str
    needs: tuple[str, ...] = ()

    @property
    def of_megatron(self) -> bool:
        """Whether no class of AMPipe runs in it."""
        return self.name.startswith(MEGATRON) or self.name == CONTROL


KINDS = (
    StepKind(MEGATRON, "Megatron's layers"),
    StepKind(CONTROL, "the same again"),
    # Megatron captures with a device alone, and modules of its overlap with Transformer Engine alone: with
    # --cuda-graph-impl local, the overlap calls around what would replay.
    StepKind(MEGATRON_GRAPHS, "Megatron's graphs", (GPU,)),
    StepKind(OVERLAP, "Megatron's overlap", (IN_16_BIT,)),
    StepKind(OVERLAP_GRAPHS, "Megatron's overlap, graphs", (GPU, IN_16_BIT, ENGINE)),
    *(StepKind(MOE_ONLY.format(degree), f"moe-only, {degree} chunks") for degree in DEGREES),
    *(StepKind(STACK.format(degree), f"{degree} chunks") for degree in DEGREES),
    *(StepKind(STACK_GRAPHS.format(degree), f"{degree} chunks, graphs", (GPU,)) for degree in DEGREES),
    *(
        StepKind(STACK_WHOLE.format(degree), f"{degree} chunks, whole graphs", (GPU, IN_16_BIT, LOCAL))
        for degree in DEGREES
    ),
    StepKind(PARTNERS, "partners"),
    StepKind(PARTNERS_WHOLE, "partners, whole graphs", (GPU, IN_16_BIT, LOCAL)),
    StepKind("partners, cut in two", "partners in 2 chunks"),
    StepKind("partners, searched", "partners, searched"),
)
"""In the order in which they are compared."""


def left_out(*, on_gpu: bool, in_16_bit: bool, of_engine: bool) -> dict[str, str]:
    """The kinds that such layers cannot run, each with what it needs."""
    given = {
        GPU: on_gpu,
        IN_16_BIT: in_16_bit,
        ENGINE: of_engine,
        LOCAL: not of_engine,
    }
    found = {}
    for kind in KINDS:
        lacking = [need for need in kind.needs if not given[need]]
        if lacking:
            found[kind.name] = f"needs {' and '.join(lacking)}"
    return found
