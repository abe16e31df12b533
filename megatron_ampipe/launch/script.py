"""A launch of training, for all ways to launch, and the functions of Megatron that it wraps.

All training passes through these functions; in a stock run they only forward their arguments. A script of a
checkout runs unedited, as ``__main__``, with its own folder first on the path, as if launched by hand.
AMPipe's own entry is :mod:`.pretrain`. The two lines of ``ampipe patch`` wrap the same functions in a
Megatron-LM tree, without the host platform.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ampipe import compat
from megatron_ampipe.block.layout import misfit
from megatron_ampipe.errors import AMPipeError, BadInput, global_rank
from megatron_ampipe.launch import config_files, flags, host
from megatron_ampipe.launch.ending import (
    end_with,
    keep_signal_from_children,
    report_parser_errors,
    run_to_end,
    warn_of_optimizer_state,
)
from megatron_ampipe.launch.run import Run, prepare_arguments, requested

if TYPE_CHECKING:
    # They import torch, which a launch imports after the flags have been read.
    from megatron_ampipe.launch.hooks import Hooks
    from megatron_ampipe.launch.megatron_types import Model
    from megatron_ampipe.layers.context import AMPipeContext

_session: TrainingSession | None = None
"""The session of this process; in a patched tree, created when a wrapped function is first called."""
_models: tuple[type, ...] = ()
"""The wrapped model classes; empty before :func:`wrap_steps`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script of a command line (by default that of the process), and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    script = "".join(words[:1])
    session = TrainingSession(words[1:], script=script)

    def run() -> int:
        if not Path(script).is_file():
            remedy = "Name it before all flags: -m megatron_ampipe.launch PATH/pretrain_gpt.py --help"
            raise session.refused_script("is not a script", remedy)
        # Replaces the entry of "python -m", as if python had been started with the script.
        sys.path[0] = str(Path(script).resolve().parent)
        sys.argv = [script, *session.prepare_platform()]
        wrap_steps(session)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        finally:
            session.end()
        if session.args is None:
            rule = "it did not read its arguments with Megatron's parser, so no flag of AMPipe was read"
            raise session.refused_script(rule)
        if session.changes_layers and session.num_models == 0:
            rule = "it builds no GPT or hybrid model of Megatron's, so nothing is pipelined"
            raise session.refused_script(rule)
        return 0

    return run_to_end(run)


def wrap_steps(session: TrainingSession | None = None) -> None:
    """Wrap Megatron's functions to call a session, in all of Megatron's modules that hold them by name.

    Call it before a script imports them. Without ``session`` (in a patched tree), the first call creates one.
    """
    global _session, _models
    _session = session or _session
    if _models:
        return
    import megatron.training as package
    from megatron.training import arguments, initialize, training

    methods = TrainingSession
    arguments.parse_args = _around(arguments.parse_args, methods.parse)
    arguments.validate_args = _around(arguments.validate_args, methods.validate)
    for name in ("parse_args", "validate_args"):
        if hasattr(initialize, name):
            setattr(initialize, name, getattr(arguments, name))
    training.setup_model_and_optimizer = _around(training.setup_model_and_optimizer, methods.set_up)
    package.pretrain = training.pretrain = _around(training.pretrain, methods.train)
    _models = models_of_megatron()
    for model in _models:
        model.__init__ = _around(model.__init__, methods.construct)  # type: ignore[misc]


def refuse_misfit(args: argparse.Namespace) -> None:
    """Raise :class:`BadInput` for parsed arguments whose layout Megatron would refuse on these ranks."""
    if (broken := misfit(args, args.world_size)) is not None:
        flag = f"--{broken.key.replace('_', '-')}"
        raise BadInput(flag, broken.value, rule=broken.rule, remedy=broken.remedy)


def models_of_megatron() -> tuple[type, ...]:
    """Megatron's GPT model, and its hybrid model if this version has one."""
    from megatron.core.models.gpt import GPTModel

    if not compat.has_hybrid_models():
        return (GPTModel,)
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return (GPTModel, HybridModel)


def _around[Output](function: Callable[..., Output], step: Callable[..., Output]) -> Callable[..., Output]:
    """Wrap a function to call a method of the session with the function and its arguments."""

    @functools.wraps(function)
    def called(*args: object, **kwargs: object) -> Output:
        global _session
        if _session is None:
            if flags.is_launched:
                return function(*args, **kwargs)
            _session = TrainingSession(sys.argv[1:], script=sys.argv[0], is_patch=True)
            # Registered, so that it is also called after a failure.
            atexit.register(_session.end)
        try:
            return step(_session, function, *args, **kwargs)
        except AMPipeError as error:
            if not _session.is_patch:
                raise
            sys.exit(end_with(error))

    return called


class TrainingSession:
    """The state of one launch and its steps.

    Megatron calls :meth:`parse`, :meth:`validate` and :meth:`train`; within that :meth:`set_up`, which calls
    :meth:`construct` for every model. A launch calls :meth:`prepare_platform` before, :meth:`end` after them.

    ``words`` is the user's command line without the program's name; ``script`` is the script that trains,
    None for AMPipe's entry. ``is_patch``: a patched tree was started without one of AMPipe's launchers, and
    may train without AMPipe or not at all; runs that are not pipelined are left to Megatron.
    """

    def __init__(self, words: Sequence[str], *, script: str | None = None, is_patch: bool = False) -> None:
        self._words = list(words)
        self._script = script
        self.is_patch = is_patch
        self._resolved: config_files.Resolved | None = None
        self._adjustments: dict[str, str] = {}
        self._hooks: Hooks | None = None
        self.args: argparse.Namespace | None = None
        """Megatron's validated arguments; None before :meth:`validate`."""
        self.context: AMPipeContext | None = None
        """The state that pipelined layers share; None in a stock run."""
        self.requested: Run | None = None
        """What the parsed flags ask for. Megatron parses them again later, which changes nothing else."""
        self.run: Run | None = None
        """What this run does; None before :meth:`validate`."""
        self.num_models = 0
        """Number of models that have got pipelined layers, or a router of the user."""

    def prepare_platform(self) -> list[str]:
        """Make Megatron importable on this machine, and return a command line that it can parse.

        In it, ``--ampipe-config`` is replaced by the settings of its files, and flags that a CPU needs are
        added if there is no GPU. Raises :class:`EnvironmentMissing` if torch or Megatron is missing, and
        :class:`BadInput` for a wrong configuration file, or for a flag that needs a GPU where there is none.
        """
        on_gpu = flags.import_megatron()
        words = list(self._words)
        if any(word.partition("=")[0] == config_files.CONFIG_FLAG for word in words):
            self._resolved = config_files.resolve(words, flags.full_parser())
            words = list(self._resolved.words)
        if on_gpu:
            return words
        words, self._adjustments = host.adjust(words)
        return words

    def parse(
        self,
        parse: Callable[..., argparse.Namespace],
        extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
        *args: object,
        **kwargs: object,
    ) -> argparse.Namespace:
        """Megatron's ``parse_args``, with AMPipe's flags, and with parser errors reported as ``BadInput``.

        In a patched tree, a command line without AMPipe's flags keeps Megatron's error messages.
        """
        is_ours = not self.is_patch or any(word.startswith("--ampipe") for word in sys.argv)

        def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser = extra_args_provider(parser) if extra_args_provider is not None else parser
            if is_ours:
                report_parser_errors(parser)
            return flags.add_arguments(parser)

        with contextlib.nullcontext() if self._resolved is None else self._resolved.locating_errors():
            parsed = parse(provide, *args, **kwargs)
            # Also refuses a --yaml-cfg, which has replaced all arguments and is not validated by Megatron.
            self.requested = requested(parsed) if is_ours else None
        if self.requested is not None:
            prepare_arguments(parsed, self.requested)
            # Arguments from a checkpoint are not known yet.
            if not self.is_patch and not parsed.use_checkpoint_args:
                self._check_early(parsed, self.requested)
        return parsed

    def _check_early(self, args: argparse.Namespace, run: Run) -> None:
        """Refuse what would fail later, before Megatron prints some 850 lines."""
        if run.pipelined and args.seq_length is not None:
            run.pipeline.chunks(args.seq_length)
        refuse_misfit(args)
        self._check_data(args)

    def _check_data(self, args: argparse.Namespace) -> None:
        from megatron_ampipe.launch.datasets import check_data, use_built_helpers
        from megatron_ampipe.launch.hooks import Hooks

        if self._hooks is None:
            self._hooks = Hooks()
            use_built_helpers(self._hooks.replace)
            check_data(args, self._hooks.replace, custom_script=self._script is not None)

    def validate(
        self,
        validate: Callable[..., argparse.Namespace],
        args: argparse.Namespace,
        *rest: object,
        **kwargs: object,
    ) -> argparse.Namespace:
        """Megatron's ``validate_args``; then AMPipe checks the run, prints the table, and saves its settings.

        No process group exists yet. Raises :class:`BadInput` for a wrong flag, file or combination.
        """
        validated = validate(args, *rest, **kwargs)
        from megatron_ampipe.launch.attach import attach
        from megatron_ampipe.launch.hooks import Hooks
        from megatron_ampipe.launch.resolve import resolve

        if self.is_patch:
            compat.require_peers()
        asked = self.requested or requested(args)
        is_active = self._is_active(asked)
        if is_active:
            self._check_data(args)
        self._hooks = self._hooks or Hooks()
        keep_signal_from_children(args)
        self.args = args
        self.run = resolve(args, asked, adjustments=self._adjustments, on_gpu=not host.installed())
        warning = warn_of_optimizer_state(args)
        notes = [] if warning is None else [("warning", "checkpoints", warning)]
        self.context = attach(self.run, self._hooks, notes=notes)
        self._hooks.install(pipelined=self.context is not None)
        if is_active and global_rank() == 0:
            self._write_record()
        return validated

    def _is_active(self, run: Run) -> bool:
        """Whether AMPipe has anything to do; a patched tree may train without it."""
        settings = run.settings
        records = settings.router is not None or settings.routing_dir is not None
        return run.pipelined or records or not self.is_patch

    def _write_record(self) -> None:
        """Write ``resolved.yaml`` into the folder of the run's output."""
        resolved = self._resolved or config_files.resolve(self._words, flags.full_parser())
        added = [f"{flag} ({reason})" for flag, reason in self._adjustments.items()]
        config_files.write_record(resolved, adjustments=added, script=self._script)

    def train[Output](self, pretrain: Callable[..., Output], *args: object, **kwargs: object) -> Output:
        """Megatron's ``pretrain``; wrapped so that errors of AMPipe end a patched tree with their message."""
        return pretrain(*args, **kwargs)

    def construct(
        self, construct: Callable[..., None], model: object, *args: object, **kwargs: object
    ) -> None:
        """A model's constructor, with a pipelined specification as its second argument."""
        signature = inspect.signature(construct)
        bound = signature.bind(model, *args, **kwargs)
        name = list(signature.parameters)[2]
        is_stack = not isinstance(model, _models[0])
        given = bound.arguments
        if self.context is not None and not is_stack:
            from megatron_ampipe.layers.layer import listed

            stage = given.get("vp_stage")
            given[name] = listed(given[name], given["config"], self.context, vp_stage=stage)
        given[name] = self.pipelined(given[name], is_stack=is_stack)
        if self.context is not None and not is_stack:
            from megatron_ampipe.layers.process_groups import make_groups_of_model

            make_groups_of_model(given["config"], self.context, given.get("pg_collection"))
        construct(*bound.args, **bound.kwargs)

    def set_up(
        self, set_up: Callable[..., tuple[list[Model], *tuple[object, ...]]], *args: object, **kwargs: object
    ) -> tuple[list[Model], *tuple[object, ...]]:
        """Megatron's ``setup_model_and_optimizer``; its models must be pipelined, and get the run's hooks."""
        from megatron.core.utils import unwrap_model

        models, *others = set_up(*args, **kwargs)
        # Megatron-FSDP has a second wrapper inside the first.
        kinds = {type(getattr(chunk, "module", chunk)) for chunk in unwrap_model(models)}
        is_changed = self.num_models > 0 and all(issubclass(kind, _models) for kind in kinds)
        if self.changes_layers and not is_changed:
            names = " and ".join(sorted(kind.__name__ for kind in kinds))
            rule = f"it trains a {names}, and only GPT and hybrid models can be pipelined"
            raise self.refused_script(rule)
        assert self._hooks is not None
        self._hooks.models_built(models)
        return models, *others

    @property
    def _gate(self) -> type | None:
        """The router class of ``--ampipe-router``; None for Megatron's own."""
        return None if self.run is None else self.run.gate

    @property
    def changes_layers(self) -> bool:
        """Whether the layers of models are changed: pipelined, or with the user's router."""
        return self.context is not None or self._gate is not None

    def pipelined(self, spec: object, *, is_stack: bool = False) -> object:
        """The specification of GPT layers, or of a hybrid stack, with pipelined blocks and the user's router.

        Raises :class:`BadInput` if a layer specification of the user has no MoE layer.
        """
        if not self.changes_layers:
            return spec
        from megatron_ampipe.layers import layer

        self.num_models += 1
        changed = spec if self._gate is None else layer.with_gate(spec, self._gate)
        if self.context is not None and not is_stack:
            changed = layer.pipelined(changed, self.context)
        elif self.context is not None:
            # Imported here, as Megatron 0.17 has no hybrid models.
            from megatron_ampipe.layers.hybrid import pipelined_stack

            changed = pipelined_stack(changed, self.context)
        assert self.args is not None
        if self.args.spec is not None and changed == spec:
            rule = "there is nothing to pipeline: this layer specification has no MoE layer"
            remedy = "Name one with MoE layers, or train with --ampipe-degree 1."
            raise BadInput("--spec", " ".join(self.args.spec), rule=rule, remedy=remedy)
        return changed

    def refused_script(self, rule: str, remedy: str | None = None) -> BadInput:
        """The error for a script that cannot run with AMPipe."""
        other = "Use a script that trains a GPT or hybrid model through megatron.training.pretrain."
        return BadInput("script", self._script or "(not given)", rule=rule, remedy=remedy or other)

    def end(self) -> None:
        """Restore Megatron's functions, and write this rank's trace; also called after a failure."""
        if self._hooks is not None:
            self._hooks.remove()
        if self.context is not None and sys.exc_info()[0] is None:
            from megatron_ampipe.launch import startup

            startup.print_end(self.context.pipeline)
