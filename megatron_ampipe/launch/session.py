"""One launch of training, from its command line to its trace: what every way to launch does, in this order.

Three adapters call a :class:`TrainingSession`, each from other places in Megatron: :mod:`.pretrain` (our
entry), :mod:`.hooks` (a script of a checkout) and :mod:`.patched` (a patched Megatron). What is checked,
printed and recorded is decided here and is the same for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ampipe.errors import BadInput, EnvironmentMissing
from megatron_ampipe.launch import config_files, flags, host
from megatron_ampipe.launch.failures import refuse_as_bad_input, report_parser_errors
from megatron_ampipe.launch.flags import LIFTS_ONE_CONNECTION, check_own_flags, config_from_args
from megatron_ampipe.plan.plan_file import Plan

ForwardStep = Callable[..., Any]

_REMEDY = (
    "Use Megatron-LM's pretrain_gpt.py or pretrain_hybrid.py, or a script that trains such a model through "
    "megatron.training.pretrain."
)


class TrainingSession:
    """What one launch knows, and its steps. A launch calls the methods in the order in which they stand.

    Args:
        words: The command line without the program's name, as the user gave it.
        script: What trains, as the user named it; None for our entry.
        is_patch: The script was started without one of our launchers, and may train without AMPipe or not
            train at all. Then a run that is not pipelined is left to Megatron.
    """

    def __init__(self, words: Sequence[str], *, script: str | None = None, is_patch: bool = False) -> None:
        self._words = list(words)
        self._script = script
        self._is_patch = is_patch
        self._resolved: config_files.Resolved | None = None
        self._adjustments: list[host.Adjustment] = []
        self._until_end = contextlib.ExitStack()
        # A plan file is read once per launch, however often the flags are looked at.
        self._read_plan = functools.cache(Plan.read)
        self.args: Any = None
        """Megatron's validated arguments; None before :meth:`accept`."""
        self.context: Any = None
        """What pipelined layers share, an ``AMPipeContext``; None before :meth:`accept` and at degree 1."""
        self.gate: Any = None
        """The router class of ``--ampipe-router``; None before :meth:`accept`, and for Megatron's own."""
        self.num_models = 0
        """How many models were given pipelined layers, or a router of the user."""

    def check_command_line(self) -> None:
        """Refuse a wrong flag of AMPipe's, before torch is imported.

        Raises:
            BadInput: There is no such flag, or its value is wrong, or it contradicts another one.
        """
        check_own_flags(self._words, read_plan=self._read_plan)

    def prepare_platform(self) -> list[str]:
        """Make Megatron importable on this machine, and the command line one that it can parse.

        Returns:
            The command line for Megatron: the settings of every ``--ampipe-config`` in place of that flag,
            and without a GPU the flags that a CPU needs.

        Raises:
            EnvironmentMissing: torch or Megatron is not there.
            BadInput: A configuration file is wrong, or a flag needs a GPU and there is none.
        """
        on_gpu = flags.import_megatron()
        words = list(self._words)
        if config_files.names_files(words):
            parser = flags.full_parser(read_plan=self._read_plan)
            self._resolved = config_files.resolve(words, parser)
            flags.check_settings(self._resolved, parser, read_plan=self._read_plan)
            words = list(self._resolved.words)
        if on_gpu:
            return words
        words, self._adjustments = host.adjust(words)
        return words

    def add_arguments(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Megatron's ``extra_args_provider``: AMPipe's flags, and errors that are reported in our form."""
        report_parser_errors(parser)
        return flags.add_arguments(parser, read_plan=self._read_plan)

    def check_parsed(self, args: Any) -> None:
        """Refuse AMPipe's flags where a ``--yaml-cfg`` has replaced them; without them it is not our concern.

        Raises:
            BadInput: They were replaced.
        """
        if any(word.startswith("--ampipe") for word in sys.argv):
            config_from_args(args, read_plan=self._read_plan)

    def accept(self, args: Any) -> None:
        """Check a run, settle how its blocks are pipelined, print the table, write ``resolved.yaml``.

        No process group exists yet.

        Args:
            args: Megatron's validated arguments.

        Raises:
            BadInput: A flag is missing or wrong, files cannot be used, or a combination is not supported.
        """
        from megatron.training import training

        from megatron_ampipe.launch.attach import accumulating_on_training_stream, make_context
        from megatron_ampipe.launch.datasets import check_data, use_built_helpers
        from megatron_ampipe.launch.ending import keep_signal_from_children
        from megatron_ampipe.launch.gate import find_gate
        from megatron_ampipe.launch.record_routing import recorded_routing

        with refuse_as_bad_input():
            config = config_from_args(args, read_plan=self._read_plan)
            if config.pipelined:
                # Validated: see there.
                setattr(args, LIFTS_ONE_CONNECTION, False)
            is_active = (
                config.pipelined
                or config.router is not None
                or config.routing_dir is not None
                or not self._is_patch
            )
            if is_active:
                use_built_helpers()
                check_data(args, of_script=self._script is not None)
            keep_signal_from_children(args)
            self.args = args
            self.gate = find_gate(config, args, of_script=self._script is not None)
            self._until_end.callback(setattr, training, "train_step", training.train_step)
            self.context = make_context(
                args, config, gate=self.gate, adjustments=self._adjustments, read_plan=self._read_plan
            )
            if self.context is not None:
                self._until_end.enter_context(accumulating_on_training_stream())
            self._until_end.enter_context(recorded_routing(args, config, self.context))
        if is_active and int(os.environ.get("RANK", "0")) == 0:
            if self._resolved is None:
                parser = flags.full_parser(read_plan=self._read_plan)
                self._resolved = config_files.resolve(self._words, parser)
            added = [f"{' '.join(change.arguments)} ({change.reason})" for change in self._adjustments]
            config_files.write_beside_logs(self._resolved, adjustments=added, script=self._script)

    def recorded(self, forward_step: ForwardStep) -> ForwardStep:
        """Megatron's forward step, which tells the recorder its iteration and adds our figures to the log.

        Called where Megatron's training begins, which may be before :meth:`accept`.

        Raises:
            EnvironmentMissing: The ranks could not find each other.
        """
        if self.context is not None or not self._is_patch:
            self._require_rendezvous()
        steps: list[ForwardStep] = []

        @functools.wraps(forward_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            if not steps:
                steps.append(self._first_step(forward_step))
            return steps[0](*args, **kwargs)

        return step

    def _first_step(self, forward_step: ForwardStep) -> ForwardStep:
        from megatron_ampipe.launch.gate import given_token_ids, reads_token_ids
        from megatron_ampipe.launch.metrics import logged
        from megatron_ampipe.launch.trace import recorded

        self.require_pipelined_model()
        self._until_end.enter_context(logged(self.context, self.args))
        if reads_token_ids(self.gate):
            forward_step = given_token_ids(forward_step)
        return recorded(forward_step, self.context, self.args)

    def _require_rendezvous(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            # Who has made the process group needs no place to meet: ampipe bench joins ranks by a file.
            return
        run = "-m megatron_ampipe.pretrain_gpt"
        if self._script is not None:
            run = self._script if self._is_patch else f"-m megatron_ampipe.launch {self._script}"
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise EnvironmentMissing(
                    f"{name} is not set, which says where ranks find each other. Start the run with "
                    f"torchrun, which sets it: torchrun --standalone --nproc-per-node 1 {run} ..."
                )

    def layer_spec(self, spec: Any) -> Any:
        """The layer specification of a GPT model, with pipelined MoE layers and the user's router."""
        if not self.changes_layers:
            return spec
        from megatron_ampipe.layers.layer import pipelined, with_gate

        self.num_models += 1
        found = spec if self.gate is None else with_gate(spec, self.gate)
        if self.context is not None:
            found = pipelined(found, self.context)
        if self.args.spec is not None and found == spec:
            raise BadInput(
                "--spec",
                " ".join(self.args.spec),
                rule="there is nothing to pipeline: this layer specification has no MoE layer",
                remedy="Name one with MoE layers, or train with --ampipe-degree 1.",
            )
        return found

    def stack_spec(self, spec: Any) -> Any:
        """The stack of a hybrid model, with pipelined attention-MoE pairs and the user's router."""
        if not self.changes_layers:
            return spec
        from megatron_ampipe.layers.hybrid import pipelined_stack
        from megatron_ampipe.layers.layer import with_gate

        self.num_models += 1
        if self.gate is not None:
            spec = with_gate(spec, self.gate)
        return spec if self.context is None else pipelined_stack(spec, self.context)

    @property
    def changes_layers(self) -> bool:
        """Whether models get other layers than Megatron's: pipelined ones, or ones with the user's router."""
        return self.context is not None or self.gate is not None

    def require_pipelined_model(self) -> None:
        """Refuse a run that was to be pipelined and has built no GPT or hybrid model of Megatron's.

        Raises:
            BadInput: Nothing is pipelined.
        """
        if self.changes_layers and self.num_models == 0:
            raise self.refused_script(
                "it builds no GPT or hybrid model of Megatron's, so nothing is pipelined"
            )

    def refused_script(self, rule: str) -> BadInput:
        """The error that this script cannot be run with AMPipe."""
        return BadInput("script", self._script, rule=rule, remedy=_REMEDY)

    def end(self) -> None:
        """Give Megatron its log and training step back, and write this rank's trace, if one was asked for.

        Also after a failure: what was recorded before it is worth seeing.
        """
        self._until_end.close()
        if self.context is not None:
            from megatron_ampipe.launch.trace import write_trace

            write_trace(self.context)
