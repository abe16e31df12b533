"""Wire classes as a user could write them."""

from collections.abc import Sequence

from torch import Tensor

from megatron_ampipe.exchange.codecs import TransferId


class HalvesWire:
    """Sends a row in two parts, the second one negated: exact, and wrong if a step is missing."""

    def encode(self, rows: Tensor, trip: TransferId) -> Sequence[Tensor]:
        half = rows.shape[1] // 2
        return rows[:, :half], -rows[:, half:]

    def decode(self, parts: Sequence[Tensor], out: Tensor, trip: TransferId) -> None:
        half = parts[0].shape[1]
        out[:, :half], out[:, half:] = parts[0], -parts[1]
