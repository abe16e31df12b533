"""The file of results, ``summary.json``: written whenever a step ends, and read by the next call.

A call continues what an earlier one has begun: of the same code, on the same GPU. Otherwise the earlier file
gets another name, and nothing of it is lost.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_check.code import Code
from gpu_check.steps import Device, Done, Outcome
from megatron_ampipe.files import outputs

FORMAT = "ampipe-gpu-check-3"
FILE = "summary.json"


class Summary:
    """What all calls have found until now.

    Args:
        folder: Of the file.
        head: Fields of the document in addition to the steps; of the last call.
        code: That runs.
        device: On which it runs.
        order: Names of all steps, in the order of the file.

    Attributes:
        continues: How many steps of an earlier call are not to be run again.
        set_aside: The new name of a file of other code, or of another GPU.
    """

    def __init__(
        self, folder: Path, head: Mapping[str, Any], *, code: Code, device: Device, order: Sequence[str]
    ) -> None:
        self._file, self._order = folder / FILE, order
        self._identity = {"code": code.digest, "device": dataclasses.asdict(device)}
        self._head = {"format": FORMAT, **head, **self._identity}
        self._earlier_s = 0.0
        self._done: dict[str, Done] = {}
        self.set_aside: Path | None = None
        earlier = self._read()
        if earlier is not None:
            self._earlier_s = earlier["seconds"]
            of_steps = [Done(**step) for step in earlier["steps"]]
            self._done = {
                one.name: dataclasses.replace(one, outcome=Outcome(one.outcome)) for one in of_steps
            }
        self.continues = sum(one.outcome.is_final for one in self._done.values())

    def _read(self) -> dict[str, Any] | None:
        """The document of an earlier call that this one continues."""
        if not self._file.is_file():
            return None
        try:
            document: dict[str, Any] = json.loads(self._file.read_text())
            same = {name: document.get(name) for name in self._identity} == self._identity
            same = same and document["format"] == FORMAT
        except (ValueError, KeyError):
            same = False
        if same:
            return document
        number = 1
        while (kept := self._file.with_stem(f"{self._file.stem}-{number}")).exists():
            number += 1
        self.set_aside = self._file.rename(kept)
        return None

    def has_ended(self, name: str) -> bool:
        """Whether a step has ended in a way that running it again would repeat."""
        return name in self._done and self._done[name].outcome.is_final

    def keep(self, done: Done, *, seconds: float) -> None:
        """Write a step, ``seconds`` after this call began.

        What an earlier call has found of it stays if this one found nothing.
        """
        before = self._done.get(done.name)
        if before is None or before.found is None or done.found is not None or done.outcome.is_final:
            self._done[done.name] = done
        self.write(seconds=seconds)

    def write(self, *, seconds: float) -> None:
        """Write the file, whole or not at all."""
        outputs.write_text(self._file, json.dumps(self.document(seconds=seconds)) + "\n")

    def document(self, *, seconds: float) -> dict[str, Any]:
        """What the file holds."""
        places = {name: place for place, name in enumerate(self._order)}
        done = sorted(self._done.values(), key=lambda one: places.get(one.name, len(places)))
        return {
            **self._head,
            "seconds": round(self._earlier_s + seconds, 1),
            "steps": [dataclasses.asdict(one) for one in done],
        }
