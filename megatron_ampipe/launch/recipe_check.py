"""What a launch of a recipe or a job script would say: everything that stops it, and the run it would be.

A launch ends at the first refusal; here all are collected, Megatron's and AMPipe's, in the words of a launch.
Nothing is trained, and no data is opened.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ampipe import compat
from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.flag_files import FlagFile
from megatron_ampipe.launch import config_files, flags, host
from megatron_ampipe.launch.ending import known_cause
from megatron_ampipe.launch.pretrain import PROGRAM_NAME, TOKENIZER_DEFAULT
from megatron_ampipe.launch.refusals import unsupported
from megatron_ampipe.launch.run import Run
from megatron_ampipe.launch.script import TrainingSession

_DATA_FLAGS = (
    *("--data-path", "--data-args-path", "--per-split-data-args-path"),
    *("--train-data-path", "--valid-data-path", "--test-data-path"),
)
"""Flags that name data, which is on the machines of the training."""
_WITHOUT_EFFECT_ON_BLOCKS = {"--cross-entropy-fusion-impl": "native"}
"""Flags that Megatron may refuse, with the value that lets the check go on; no block depends on them."""
_DEGREE = ("--ampipe-degree", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a launch would say.

    Attributes:
        args: Megatron's arguments; validated if ``run`` is not None, else as far as Megatron got.
        run: The run; None if anything stops it.
        stops: The refusals, each as a launch prints it.
        notes: What was left out of the check.
        left_out: The flags of the recipe with which Megatron's parser would end the launch.
        replaced: Words of a command line with which the check went on.
    """

    args: argparse.Namespace
    run: Run | None
    stops: tuple[str, ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    replaced: tuple[str, ...]


def judge(recipe: FlagFile, words: Sequence[str], *, ranks: int, ranks_per_node: int | None) -> Judgement:
    """Check a launch of the recipe with further words of a command line on so many ranks.

    Without a flag of AMPipe in either, it is checked with two chunks.

    Raises:
        BadInput: so much is wrong that Megatron's parser returns no arguments.
    """
    flags.import_megatron()
    stops: list[str] = []
    notes: list[str] = []
    parser = flags.full_parser()
    known, unknown = config_files.split_recipe(recipe, parser)
    if unknown:
        names = ", ".join(given.flag for given in unknown)
        version = compat.found_version("megatron-core")
        stops.append(f"Megatron {version} has no {names}, so its parser ends the launch")
    if any(given.flag in _DATA_FLAGS for given in known.flags):
        kept = tuple(given for given in known.flags if given.flag not in _DATA_FLAGS)
        known = replace(known, flags=kept)
    notes.append("not checked: data, tokenizer and checkpoints")
    words = [*words, "--mock-data"]
    if not any(word.startswith("--ampipe-") for word in (*known.words, *words)):
        words += _DEGREE
    known = _without_wrong_values(known, words, parser, stops)
    kept_flags = {given.flag for given in known.flags}
    left_out = {given.flag for given in recipe.flags} - kept_flags - {*_DATA_FLAGS}
    with _environment_of(recipe, ranks, ranks_per_node):
        judgement = _judged(known, words, stops, notes)
    return replace(judgement, left_out=tuple(sorted(left_out)))


def _without_wrong_values(
    recipe: FlagFile, words: Sequence[str], parser: argparse.ArgumentParser, stops: list[str]
) -> FlagFile:
    """The recipe without flags whose values the parser refuses; adds each refusal to ``stops``."""
    while True:
        resolved = config_files.resolve(words, parser, recipe=recipe)
        try:
            with resolved.locating_errors(), contextlib.redirect_stderr(io.StringIO()):
                parser.parse_known_args(resolved.words)
            return recipe
        except BadInput as refusal:
            flag = refusal.name.rpartition(" ")[2]
            left = tuple(given for given in recipe.flags if given.flag != flag)
            if len(left) == len(recipe.flags):
                raise
            stops.append(f"Megatron: {refusal}")
            recipe = replace(recipe, flags=left)


@contextlib.contextmanager
def _environment_of(recipe: FlagFile, ranks: int, ranks_per_node: int | None) -> Iterator[None]:
    """The variables of a launch on these ranks, for as long as it is checked."""
    before = dict(os.environ)
    changed: dict[str, str] = {**recipe.environment, "WORLD_SIZE": str(ranks), "RANK": "0"}
    try:
        os.environ.update(changed)
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if ranks_per_node is not None:
            os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _judged(recipe: FlagFile, words: Sequence[str], stops: list[str], notes: list[str]) -> Judgement:
    """Validate, with values that let Megatron go on where it refuses one that no block depends on."""
    parser = flags.full_parser()
    replaced: dict[str, str] = {}
    while True:
        given = [*words, *(word for pair in replaced.items() for word in pair)]
        resolved = config_files.resolve(given, parser, recipe=recipe)
        args, session, refusal = _validated(resolved)
        if refusal is None:
            break
        stops.append(_shown(refusal, resolved))
        neutral = _neutral(str(refusal), replaced)
        if neutral is None:
            break
        replaced |= neutral
        notes += [
            f"checked on with {flag} {value}, on which no block depends" for flag, value in neutral.items()
        ]
    run = session.requested
    assert run is not None
    if run.pipelined:
        stops += [_shown(found, resolved) for found in unsupported(run.settings, run.pipeline, args)]
    if not stops:
        run, refusal = _resolved_run(args, run)
        stops += [] if refusal is None else [_shown(refusal, resolved)]
    return Judgement(
        args=args,
        run=None if stops else run,
        stops=tuple(stops),
        notes=tuple(notes),
        left_out=(),
        replaced=tuple(word for pair in replaced.items() for word in pair),
    )


def _validated(
    resolved: config_files.Resolved,
) -> tuple[argparse.Namespace, TrainingSession, Exception | None]:
    """The arguments after Megatron's validation, and what it refused; None if nothing."""
    from megatron.training.arguments import parse_args, validate_args

    session = TrainingSession(resolved.words)
    parsed: list[argparse.Namespace] = []

    def parse(*args: object, **kwargs: object) -> argparse.Namespace:
        parsed.append(parse_args(*args, **kwargs))
        return parsed[0]

    refusal: Exception | None = None
    with _as_launched(resolved.words):
        try:
            session.parse(parse)
            validate_args(parsed[0], TOKENIZER_DEFAULT)
        except Exception as error:
            cause = known_cause(error) or error
            if not isinstance(cause, BadInput) or not parsed:
                raise cause from error
            refusal = cause
    return parsed[0], session, refusal


@contextlib.contextmanager
def _as_launched(words: Sequence[str]) -> Iterator[None]:
    """Megatron reads the command line of the process, and prints several hundred lines."""
    before = sys.argv
    sys.argv = [PROGRAM_NAME, *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        sys.argv = before


def _neutral(said: str, replaced: Mapping[str, str]) -> dict[str, str] | None:
    """The flags to replace after a refusal that names one of them; None if it names none."""
    found = {flag: value for flag, value in _WITHOUT_EFFECT_ON_BLOCKS.items() if flag in said}
    return found if found and not found.keys() & replaced.keys() else None


def _shown(refusal: Exception, resolved: config_files.Resolved) -> str:
    """A refusal as a launch prints it, with the line that sets the flag."""
    try:
        with resolved.locating_errors():
            raise refusal
    except BadInput as located:
        return str(located)


def _resolved_run(args: argparse.Namespace, run: Run) -> tuple[Run, BadInput | None]:
    """The run, with what is refused only when it is resolved, such as values of other files."""
    from megatron_ampipe.launch.resolve import resolve

    try:
        return resolve(args, run, adjustments={}, on_gpu=not host.installed()), None
    except BadInput as refusal:
        return run, refusal
