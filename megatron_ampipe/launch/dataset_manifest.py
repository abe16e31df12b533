"""The files that belong to a dataset of ``ampipe data``, and what it was made from. No torch.

``ampipe data`` writes them (``tools.data_command``); a launch reads the manifest to check the vocabulary
(:mod:`.data_paths`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 256
"""Tokens are the bytes of a text, so they are less than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a finished dataset was made from; the content of ``PREFIX.json``.

    Attributes:
        source: The directory.
        suffixes: The suffixes that selected files.
        files: Number of files.
        documents: Number of documents, of which a file can give several.
        document_bytes: Files longer than this were cut; 0 for none.
        size_bytes: Length of all documents together.
        tokens: The same with one end-of-document token each.
        vocabulary: Tokens are less than this.
        skipped: Unusable files that were left out.
        content: Fingerprint of names and contents.
        metadata: Fingerprint of names, sizes and modification times.
    """

    source: str
    suffixes: tuple[str, ...]
    files: int
    documents: int
    document_bytes: int
    size_bytes: int
    tokens: int
    vocabulary: int
    skipped: int
    content: str
    metadata: str


@dataclass(frozen=True, slots=True)
class DatasetPaths:
    """The names that belong to one prefix."""

    prefix: Path

    @property
    def data(self) -> Path:
        return self._with(".bin")

    @property
    def index(self) -> Path:
        return self._with(".idx")

    @property
    def manifest(self) -> Path:
        return self._with(".json")

    @property
    def partial(self) -> Path:
        return self._with(".partial")

    @property
    def cache(self) -> Path:
        """Where Megatron keeps which sample is made of which tokens, unless ``--data-cache-path`` says so."""
        return self.prefix / "cache"

    @property
    def journal(self) -> Path:
        return self.partial / "journal.json"

    def shard(self, number: int) -> Path:
        """Prefix of a shard."""
        return self.partial / f"shard-{number:06d}"

    def _with(self, suffix: str) -> Path:
        return self.prefix.with_name(self.prefix.name + suffix)


def read_manifest(paths: DatasetPaths) -> Manifest | None:
    """What stands in ``PREFIX.json``; None when it is absent or was not written by us."""
    try:
        values: dict[str, Any] = json.loads(paths.manifest.read_text())
        # The first versions cut no file, and did not say so.
        whole = {"documents": values["files"], "document_bytes": 0, "vocabulary": VOCABULARY}
        return Manifest(**{**whole, **values, "suffixes": tuple(values["suffixes"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
