"""Model files: Megatron's flags as YAML, read without Megatron.

A model file has Megatron's flags without leading dashes (``num-layers: 12``) and AMPipe's in a section
``ampipe:``. Flags that do not change the size of a block are checked by Megatron's parser, at launch or by
``ampipe config``. In a run, Megatron's arguments are used instead of a file. :mod:`.model_block` makes the
block and the layers of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from megatron_ampipe.block.settings import SETTING, Settings
from megatron_ampipe.errors import BadInput, did_you_mean, nearest
from megatron_ampipe.files.inputs import LinedMapping, find_config, load, refuse
from megatron_ampipe.plan.model_flags import TRAINING_FLAGS, ModelFlags


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file whose keys are checked; :attr:`flags` checks the values.

    Attributes:
        path: The file.
        values: Megatron's flags; values from the command line replace the values of the file.
        lines: The line of each flag; 0 for a value from the command line.
        own: AMPipe's settings in the section ``ampipe:``; their values are not checked.
    """

    path: Path
    values: Mapping[str, object]
    lines: Mapping[str, int]
    own: Settings = Settings()  # noqa: RUF009

    @property
    def flags(self) -> ModelFlags:
        """The values of the flags.

        Raises:
            BadInput: a flag is missing or invalid; the message names file and line.
        """
        return self.read(ModelFlags)

    def read[Flags: ModelFlags](self, kind: type[Flags]) -> Flags:
        """The values of these flags; raises BadInput as :attr:`flags` does."""
        values = {key.replace("-", "_"): value for key, value in self.values.items() if value is not None}
        try:
            return kind.model_validate({key: values[key] for key in kind.model_fields if key in values})
        except ValidationError as error:
            wrong = error.errors()[0]
        key = str(wrong["loc"][0]).replace("_", "-")
        if wrong["type"] == "missing":
            remedy = f"Add '{key}: ...', or give --set {key}=... {did_you_mean(key, self.values, cutoff=0.9)}"
            refuse(self.path, 1, key, "is missing", remedy.rstrip())
        rule = wrong["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        self.refuse(key, rule)

    def refuse(self, key: str, rule: str, remedy: str = "Write another value, or leave it out.") -> NoReturn:
        """Raise BadInput for the value of a key."""
        shown, line = f"{key} {self.values.get(key, '(default)')}", self.lines.get(key, 1)
        place = f"{self.path}:{line}:" if line else "--set"
        raise BadInput(place, shown, rule=rule, remedy=remedy)


def find_model(text: str) -> Path:
    """The file that ``--model`` names: a path, or the name of a file in ``configs/models``."""
    return find_config(text, folders=("models",), flag="--model", what="model")


def read_model(path: Path, *, overrides: Mapping[str, object] | None = None) -> ModelFile:
    """Read a model file and check its keys.

    Args:
        path: The file.
        overrides: Flags from the command line, which replace the flags of the file.

    Raises:
        BadInput: a key in the section ``ampipe:``, or on the command line, is unknown.
    """
    top = load(path, what="model", remedy="Write Megatron's flags without dashes: 'num-layers: 12'.")
    values, lines = dict(top), dict(top.lines)
    section = values.pop("ampipe", LinedMapping(1))
    known = {setting.key for setting in SETTING.values()}
    if not isinstance(section, LinedMapping):
        rule, remedy = "must hold AMPipe's settings, as keys with values", "Write 'degree: 4' below it."
        refuse(path, lines["ampipe"], "ampipe", rule, remedy)
    for key in section.keys() - known:
        refuse(path, section.lines[key], key, "there is no such setting of AMPipe", nearest(key, known))
    for key, value in values.items():
        if isinstance(value, LinedMapping):
            refuse(path, lines[key], key, "is a section, and only 'ampipe:' is one", "Write 'ampipe:'.")
    for key, value in (overrides or {}).items():
        values[key], lines[key] = value, 0
        if key not in TRAINING_FLAGS:
            guess = did_you_mean(key, TRAINING_FLAGS) or "Leave it out."
            rule = "has no effect: no size of a block depends on it"
            ModelFile(path, values, lines).refuse(key, rule, guess)
    own = {key.replace("-", "_"): value for key, value in section.items()}
    return ModelFile(path, values, lines, Settings(**own))
