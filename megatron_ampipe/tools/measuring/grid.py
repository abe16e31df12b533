"""Grids: YAML files that say which blocks to measure. Read with PyYAML's safe loader and checked key by key.

A grid holds ``cases`` (a list), or ``axes`` (a list of lists: every combination of one entry of each is a
case, named by joining the entries' names). ``defaults`` stand behind both. ``fits`` leaves out what would
not have fitted some memory, and ``expected_cases`` says how many must be left. Called by ``ampipe bench``.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from megatron_ampipe.errors import BadInput
from megatron_ampipe.shipped import find_config
from megatron_ampipe.yaml_lines import LinedMapping, load

_MAXIMUM_CASES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One block, with the tokens of one micro-batch. Every figure without a default has to be given."""

    name: str
    sequence_length: int
    """Rows of the sequence on each rank."""
    batch: int
    """Sequences in the micro-batch."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    query_groups: int | None = None
    """Key and value heads; as many as query heads if left out."""
    head_size: int | None = None
    """Width of a head; hidden / heads if left out."""
    experts: int
    """Experts over all ranks."""
    topk: int
    """Experts per token."""
    ffn: int
    """Width inside an expert."""
    shared_ffn: int | None = None
    """Width inside the shared experts together; none if left out."""
    activation: Literal["gelu", "swiglu"]
    """Inside experts."""
    expert_kind: Literal["sequential", "grouped", "torch-grouped"] = "sequential"
    """A rank's experts one after another; in Transformer Engine's grouped products, as with
    --moe-grouped-gemm; or in torch's, which needs no extra package."""
    capacity: float | None = None
    """Capacity factor: tokens above it are dropped by position. No token is dropped if left out."""
    dtype: Literal["fp32", "bf16", "fp16"]
    """Of parameters and activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Keep a case if ``blocks * 2 bytes * tokens * hidden * (fixed + per_expert * topk)`` fits a memory."""

    memory_gib: float
    """Memory of the device."""
    blocks: float
    """How many blocks' tensors are held at once."""
    fixed: float
    """Tensors of ``tokens * hidden`` outside the experts."""
    per_expert: float
    """Such tensors for each expert that a token visits."""

    def holds(self, case: Case) -> bool:
        """Whether the case fits."""
        tensors = self.fixed + self.per_expert * case.topk
        size = self.blocks * 2 * case.sequence_length * case.batch * case.hidden * tensors
        return size <= self.memory_gib * 2**30


@dataclass(frozen=True, slots=True)
class Grid:
    """A checked grid.

    Attributes:
        name: Stem of the file.
        path: The file.
        cases: In the order of the file, names unique.
    """

    name: str
    path: Path
    cases: tuple[Case, ...]

    def only(self, names: str | None) -> Grid:
        """The grid with the cases of these names alone, separated by commas; all of them for None.

        Raises:
            BadInput: there is no such case.
        """
        if names is None:
            return self
        chosen, known = names.split(","), [case.name for case in self.cases]
        for name in chosen:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3) or known[:3]
                raise BadInput(
                    "--cases",
                    name or "(empty)",
                    rule=f"is not a case of {self.path}",
                    remedy=f"Use --cases {','.join(near)}.",
                )
        return dataclasses.replace(self, cases=tuple(case for case in self.cases if case.name in chosen))


def find_grid(text: str) -> Path:
    """The file that ``--grid`` means: one that exists, or the name of one in ``configs/bench``.

    Raises:
        BadInput: neither.
    """
    return find_config(text, folders=["bench"], flag="--grid", what="grid")


def read_grid(path: Path) -> Grid:
    """Read and check a grid.

    Raises:
        BadInput: naming the file, the line and the key that is wrong.
    """
    top = load(path, what="grid", remedy="Look at configs/bench/cpu-small.yaml for the form.")
    known = {"description", "defaults", "cases", "axes", "fits", "expected_cases"}
    for key in top:
        if key not in known:
            _refuse(path, top.lines[key], key, f"is not one of {', '.join(sorted(known))}", "Leave it out.")
    if ("cases" in top) == ("axes" in top):
        _refuse(path, top.line, "cases", "exactly one of cases and axes must be given", "Give cases.")
    defaults = _mapping(path, top, "defaults") if "defaults" in top else LinedMapping(top.line)
    if "cases" in top:
        entries = [[entry] for entry in _entries(path, top, "cases")]
    else:
        axes = _list(path, top, "axes")
        choices = [_entries(path, {"axes": axis}, "axes", line=top.lines["axes"]) for axis in axes]
        _limit(path, top, choices)
        entries = [list(combination) for combination in itertools.product(*choices)]
    cases = [_case(path, defaults, parts) for parts in entries]
    if "fits" in top:
        mapping = _mapping(path, top, "fits")
        fits = Fits(**_checked(path, Fits, mapping, mapping.lines, mapping.line))
        cases = [case for case in cases if fits.holds(case)]
    _check_whole(path, top, cases)
    return Grid(path.stem, path, tuple(cases))


def _check_whole(path: Path, top: LinedMapping, cases: list[Case]) -> None:
    names = [case.name for case in cases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        _refuse(path, top.line, f"name {twice}", "two cases have it", "Give every case a name of its own.")
    if not cases:
        _refuse(path, top.line, "cases", "no case is left", "Name at least one case.")
    expected = top.get("expected_cases", len(cases))
    if type(expected) is not int or expected != len(cases):
        line = top.lines["expected_cases"]
        _refuse(
            path, line, f"expected_cases {expected}", f"{len(cases)} cases are left", f"Write {len(cases)}."
        )


def _limit(path: Path, top: LinedMapping, choices: list[list[LinedMapping]]) -> None:
    count = 1
    for choice in choices:
        count *= len(choice)
    if not 0 < count <= _MAXIMUM_CASES:
        line = top.lines["axes"]
        _refuse(path, line, "axes", f"they make {count} cases", f"Make at least 1, at most {_MAXIMUM_CASES}.")


def _case(path: Path, defaults: LinedMapping, parts: list[LinedMapping]) -> Case:
    merged: dict[str, Any] = dict(defaults)
    lines = dict(defaults.lines)
    names = []
    for part in parts:
        if "name" not in part:
            _refuse(path, part.line, "name", "is missing", "Add for example 'name: top1'.")
        if not isinstance(part["name"], str) or not part["name"]:
            _refuse(path, part.lines["name"], "name", "must be text", "Write for example 'name: top1'.")
        names.append(part["name"])
        merged |= part
        lines |= part.lines
    merged["name"] = "-".join(names)
    case = Case(**_checked(path, Case, merged, lines, parts[0].line))
    _check_figures(path, case, lines)
    return case


def _check_figures(path: Path, case: Case, lines: Mapping[str, int]) -> None:
    """What one figure must be, given the others."""

    def refuse(key: str, rule: str, remedy: str) -> NoReturn:
        _refuse(path, lines[key], f"{key} {getattr(case, key)} (case {case.name})", rule, remedy)

    if case.head_size is None and case.hidden % case.heads:
        refuse("heads", f"does not divide hidden {case.hidden}", "Choose a divisor, or give head_size.")
    if case.query_groups is not None and case.heads % case.query_groups:
        refuse("query_groups", f"does not divide heads {case.heads}", "Choose a divisor.")
    if case.topk > case.experts:
        refuse("topk", f"is above experts {case.experts}", f"Choose at most {case.experts}.")


def _checked(
    path: Path, kind: type, values: Mapping[str, Any], lines: Mapping[str, int], line: int
) -> dict[str, Any]:
    """Hold values against the fields of a dataclass: known, present, of the declared type, positive."""
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            _refuse(path, lines[key], key, f"is not one of {', '.join(hints)}", "Leave it out.")
    for field in fields(kind):
        if field.name not in values:
            if field.default is MISSING:
                _refuse(path, line, field.name, "is missing", f"Add '{field.name}: ...' here or to defaults.")
            continue
        value = values[field.name]
        wanted = _what_is_wrong(value, hints[field.name])
        if wanted is not None:
            shown = f"{field.name} {value!r}"
            _refuse(path, lines.get(field.name, line), shown, f"must be {wanted}", f"Write {wanted}.")
    return {key: float(value) if hints[key] is float else value for key, value in values.items()}


def _what_is_wrong(value: object, hint: Any) -> str | None:
    """What the value should have been, None if it is that."""
    if typing.get_origin(hint) is types.UnionType:
        if value is None:
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return None if isinstance(value, str) and value in choices else f"one of {', '.join(choices)}"
    if hint is str:
        return None if isinstance(value, str) and value else "text"
    if hint is int:
        return None if type(value) is int and value > 0 else "a whole number of at least 1"
    assert hint is float
    good = type(value) in (int, float) and 0 < typing.cast(float, value) < float("inf")
    return None if good else "a number above 0"


def _mapping(path: Path, top: LinedMapping, key: str) -> LinedMapping:
    if not isinstance(top[key], LinedMapping):
        _refuse(
            path, top.lines[key], key, "must hold keys with values", "Write one 'key: value' on each line."
        )
    return typing.cast(LinedMapping, top[key])


def _list(path: Path, top: LinedMapping, key: str) -> list[Any]:
    if not isinstance(top[key], list) or not top[key]:
        _refuse(path, top.lines[key], key, "must be a list that is not empty", "Begin every entry with '- '.")
    return typing.cast(list[Any], top[key])


def _entries(path: Path, top: Mapping[str, Any], key: str, *, line: int | None = None) -> list[LinedMapping]:
    """A list of mappings."""
    at = top.lines[key] if isinstance(top, LinedMapping) else line or 1
    found = top[key]
    if not isinstance(found, list) or not found:
        _refuse(path, at, key, "must be a list that is not empty", "Begin every entry with '- '.")
    for entry in found:
        if not isinstance(entry, LinedMapping):
            _refuse(
                path, at, f"{key} {entry!r}", "every entry must hold keys with values", "Write '- name: ...'."
            )
    return typing.cast(list[LinedMapping], found)


def _refuse(path: Path, line: int, key: str, rule: str, remedy: str) -> NoReturn:
    raise BadInput(f"{path}:{line}:", key, rule=rule, remedy=remedy)
