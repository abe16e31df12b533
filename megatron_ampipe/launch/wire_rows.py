"""The rows of the start-up table about what is sent: casts and condensed tokens. Called by :mod:`.attach`."""

from __future__ import annotations

from megatron_ampipe.config import AMPipeConfig

_WIRE = {
    "bf16": "rows and their gradients travel in bf16",
    "fp8": "rows and their gradients travel in fp8 (e4m3) with a scale per row",
}


def wire_rows(config: AMPipeConfig) -> list[tuple[str, str, str]]:
    """The rows for settings by which fewer bytes are sent, and numbers are others than in a stock run."""
    rows = []
    if config.wire is not None:
        reason = _WIRE.get(config.wire, "rows and their gradients go through this class")
        if config.pipeline.exchange.has_two_hops:
            reason += ", between nodes alone"
        reason += "; numbers are rounded, so losses differ from a stock run's"
        rows.append(("wire", config.wire, reason))
    if config.condense is not None:
        reason = (
            "another function than a stock run's: of the tokens of a sequence and chunk that go to one "
            "expert, one whose cosine with an earlier one is at least this takes its result; the log says "
            "how many do"
        )
        rows.append(("condensed tokens", f"{config.condense:g}", reason))
    return rows
