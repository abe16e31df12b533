"""A checkpoint on disk: which one a run would load, and whether its files are whole.

Knows the folders that Megatron writes (``latest_checkpointed_iteration.txt``, ``iter_0000004/``) in its
formats ``torch_dist`` and ``torch``. Looks at names, sizes and headers; reads no weights, and runs nothing
that a file names. Called by :mod:`.checkpoints`.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import BadInput

TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_SETTINGS, _INDEX = "metadata.json", ".metadata"
_LARGEST_INDEX_BYTES = 256 << 20
"""An index that is longer is left to Megatron: every rank would read it twice."""
_ZIP, _OLD_PICKLE = b"PK\x03\x04", b"\x80"


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint.

    Attributes:
        flag: The flag that names the folder of checkpoints, for messages.
        folder: That folder.
        path: The folder of this one.
    """

    flag: str
    folder: Path
    path: Path

    @property
    def is_distributed(self) -> bool:
        """Whether it is of the format ``torch_dist``."""
        return (self.path / _SETTINGS).exists()

    def refuse(self, rule: str) -> BadInput:
        """The error of a checkpoint that cannot be loaded."""
        return BadInput(self.flag, self.folder, rule=rule, remedy=_others(self.folder, self.path))


def find_checkpoint(flag: str, folder: Path, *, step: int | None) -> Saved | None:
    """The checkpoint that Megatron would load from a folder; None where there is none.

    Args:
        flag: The flag that names the folder.
        folder: What it names.
        step: The value of ``--ckpt-step``.

    Raises:
        BadInput: The folder is a file, its note of the newest checkpoint cannot be used, or
            that
            checkpoint is not there.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput(flag, folder, rule="is a file", remedy="Name the folder that a run saved to.")
    tracker = folder / TRACKER
    if tracker.exists() and not tracker.is_file():
        raise BadInput(
            flag, folder, rule=f"{tracker} is no plain file", remedy="Name the folder that a run saved to."
        )
    name = _name_in(flag, tracker) if tracker.is_file() else None
    if step:
        name = _name_of(step)
    if name is None:
        return None
    saved = Saved(flag, folder, folder / name)
    if not saved.path.is_dir():
        said = f"--ckpt-step {step} asks" if step else f"{tracker} asks"
        raise saved.refuse(f"{said} for {name}, and there is no such folder")
    return saved


def check_files(saved: Saved) -> None:
    """Refuse a checkpoint of which a file is missing, cut off or of another kind.

    Raises:
        BadInput: names the file.
    """
    legacy = sorted(saved.path.glob("mp_rank_*"))
    if saved.is_distributed:
        _check_settings(saved)
    elif legacy:
        for folder in legacy:
            _check_archive(saved, folder / "model_optim_rng.pt")
        return
    if not (saved.path / _INDEX).exists():
        raise saved.refuse(f"{saved.path} holds no checkpoint of Megatron's: {_INDEX} is missing in it")
    _check_shards(saved)


def _name_in(flag: str, tracker: Path) -> str:
    try:
        text = tracker.read_text(errors="replace").strip()
    except OSError as error:
        raise BadInput(
            flag,
            tracker.parent,
            rule=f"{tracker} cannot be read ({error.strerror})",
            remedy="Make it readable.",
        ) from error
    # As Megatron reads it, which takes 04 and a sign as well.
    if re.fullmatch(r"\+?\d{1,18}", text):
        return _name_of(int(text))
    if text == _RELEASE:
        return _RELEASE
    rule = f"{tracker} says {text[:40]!r}, which is neither the number of an iteration nor {_RELEASE}"
    raise BadInput(flag, tracker.parent, rule=rule, remedy=_others(tracker.parent, None))


def _name_of(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _others(folder: Path, bad: Path | None) -> str:
    """What to do, with the checkpoints that can be loaded instead."""
    found = [
        int(path.name.removeprefix("iter_"))
        for path in sorted(folder.glob("iter_*[0-9]"))
        if path != bad and _looks_whole(path) and path.name.removeprefix("iter_").isdecimal()
    ]
    if not found:
        return f"Name another folder, or take {folder / TRACKER} away to start from the beginning."
    newest = found[-1]
    known = ", ".join(map(str, found[-5:]))
    return (
        f"Saved here: {known}. Write one of these into {folder / TRACKER}, for example: echo {newest} > FILE."
    )


def _looks_whole(path: Path) -> bool:
    """Whether what Megatron writes last is there."""
    return (path / _SETTINGS).is_file() or (path / _INDEX).is_file() or any(path.glob("mp_rank_*/*.pt"))


def _check_settings(saved: Saved) -> None:
    path = saved.path / _SETTINGS
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise saved.refuse(f"{path} is not JSON ({error})") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("sharded_backend"), str):
        raise saved.refuse(f"{path} does not say in which format the checkpoint is (sharded_backend)")


def _check_archive(saved: Saved, path: Path) -> None:
    """Whether a file of ``torch.save`` has its end, where its table of contents is."""
    if not path.is_file():
        raise saved.refuse(f"{path} is missing")
    with path.open("rb") as file:
        start = file.read(len(_ZIP))
    if start != _ZIP and start[:1] != _OLD_PICKLE:
        raise saved.refuse(f"{path} was not written by torch.save: it begins with {start!r}")
    if start == _ZIP:
        try:
            zipfile.ZipFile(path).close()
        except zipfile.BadZipFile as error:
            size = path.stat().st_size
            raise saved.refuse(f"{path} is cut off after {size} bytes or damaged ({error})") from error


def _check_shards(saved: Saved) -> None:
    """Whether every file of a distributed checkpoint is as long as the index says."""
    index = saved.path / _INDEX
    if index.stat().st_size > _LARGEST_INDEX_BYTES:
        return
    try:
        found = _IndexReader(io.BytesIO(index.read_bytes())).load()
        pieces = list(_pieces(found))
    except _UnknownKind:
        # Something that another version writes: Megatron will see.
        return
    except Exception as error:
        size = index.stat().st_size
        raise saved.refuse(f"{index} is cut off or damaged ({size} bytes; {error})") from error
    ends: dict[str, int] = {}
    starts: dict[str, int] = {}
    for name, offset, length in pieces:
        ends[name] = max(ends.get(name, 0), offset + length)
        starts[name] = min(starts.get(name, offset), offset)
    for name in sorted(ends):
        path = saved.path / name
        if not path.is_file():
            raise saved.refuse(f"{path} is missing")
        size = path.stat().st_size
        if size < ends[name]:
            raise saved.refuse(f"{path} is cut off: it has {size} bytes, and {index} says {ends[name]}")
        with path.open("rb") as file:
            file.seek(starts[name])
            start = file.read(len(_ZIP))
        if start != _ZIP and start[:1] != _OLD_PICKLE:
            raise saved.refuse(
                f"{path} is damaged: at byte {starts[name]} it has {start!r}, which is no tensor"
            )


def _pieces(index: Any) -> Iterator[tuple[str, int, int]]:
    """File, offset and length of every piece of a checkpoint."""
    for place in index.storage_data.values():
        yield place.relative_path, place.offset, place.length


class _UnknownKind(Exception):
    """An index holds something that is not known to be data."""


class _IndexReader(pickle.Unpickler):
    """Unpickles torch's index of a distributed checkpoint, of known kinds of records alone."""

    def find_class(self, module: str, name: str) -> Any:
        """What ``module.name`` is, if making one does nothing."""
        import torch
        import torch.distributed.checkpoint.planner

        if module.startswith("torch.distributed.checkpoint.") and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)):
                return found
            if found is torch.distributed.checkpoint.planner.WriteItemType:
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        raise _UnknownKind(f"{module}.{name}")


_HARMLESS: Iterable[tuple[str, str]] = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    }
)
"""What torch puts into an index in addition to its own records."""
