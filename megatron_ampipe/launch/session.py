"""One launch of training, from its command line to its trace: what every way to launch does, in this order.

The steps of Megatron that call a :class:`TrainingSession` are in :mod:`.script`. What is checked, printed and
recorded is the same for our entry (:mod:`.pretrain`), a script of a checkout, and a patched Megatron.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ampipe import compat
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import config_files, flags, host
from megatron_ampipe.launch.ending import keep_signal_from_children, report_parser_errors
from megatron_ampipe.launch.flags import LIFTS_ONE_CONNECTION, config_from_args

ForwardStep = Callable[..., Any]


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
        self.script = script
        self.is_patch = is_patch
        self._resolved: config_files.Resolved | None = None
        self._adjustments: list[host.Adjustment] = []
        self._hooks: Any = None
        self.args: Any = None
        """Megatron's validated arguments; None before :meth:`accept`."""
        self.context: Any = None
        """What pipelined layers share, an ``AMPipeContext``; None before :meth:`accept` and at degree 1."""
        self.gate: Any = None
        """The router class of ``--ampipe-router``; None before :meth:`accept`, and for Megatron's own."""
        self.num_models = 0
        """How many models were given pipelined layers, or a router of the user."""

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
        if any(word.partition("=")[0] == config_files.CONFIG_FLAG for word in words):
            parser = flags.full_parser()
            self._resolved = config_files.resolve(words, parser)
            flags.check_settings(self._resolved, parser)
            words = list(self._resolved.words)
        if on_gpu:
            return words
        words, self._adjustments = host.adjust(words)
        return words

    def add_arguments(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Megatron's ``extra_args_provider``: AMPipe's flags, and errors that are reported in our form.

        Without AMPipe's flags, what is wrong with a command line of a patched tree is Megatron's to say.
        """
        if not self.is_patch or names_own_flags():
            report_parser_errors(parser)
        return flags.add_arguments(parser)

    def accept(self, args: Any) -> None:
        """Check a run, settle how its blocks are pipelined, print the table, write ``resolved.yaml``.

        No process group exists yet; ``args`` are Megatron's, validated.

        Raises:
            BadInput: A flag is missing or wrong, files cannot be used, or a combination is not supported.
        """
        from megatron_ampipe.launch.attach import find_gate, make_context
        from megatron_ampipe.launch.datasets import check_data, use_built_helpers
        from megatron_ampipe.launch.hooks import Hooks

        if self.is_patch:
            compat.require_peers()
        config = config_from_args(args)
        if config.pipelined:
            # Validated: see there.
            setattr(args, LIFTS_ONE_CONNECTION, False)
        own = (config.router, config.routing_dir)
        is_active = config.pipelined or own != (None, None) or not self.is_patch
        self._hooks = Hooks()
        if is_active:
            use_built_helpers(self._hooks.replace)
            check_data(args, self._hooks.replace, of_script=self.script is not None)
        keep_signal_from_children(args)
        self.args = args
        self.gate = find_gate(config, args)
        self.context = make_context(
            args, config, gate=self.gate, hooks=self._hooks, adjustments=self._adjustments
        )
        self._hooks.install(pipelined=self.context is not None)
        if is_active and int(os.environ.get("RANK", "0")) == 0:
            resolved = self._resolved or config_files.resolve(self._words, flags.full_parser())
            added = [f"{' '.join(change.arguments)} ({change.reason})" for change in self._adjustments]
            config_files.write_beside_logs(resolved, adjustments=added, script=self.script)

    def hooked(self, forward_step: ForwardStep) -> ForwardStep:
        """Megatron's forward step with the hooks of this run, which may be given before :meth:`accept`."""

        @functools.wraps(forward_step)
        def step(data_iterator: Any, model: Any, *rest: Any, **kwargs: Any) -> Any:
            if self._hooks is not None:
                self._hooks.before_forward(model)
            return forward_step(data_iterator, model, *rest, **kwargs)

        return step

    @property
    def changes_layers(self) -> bool:
        """Whether models get other layers than Megatron's: pipelined ones, or ones with the user's router."""
        return self.context is not None or self.gate is not None

    def pipelined(self, spec: Any, *, is_stack: bool = False) -> Any:
        """A specification of GPT layers, or a hybrid stack, with pipelined blocks and the user's router.

        Raises:
            BadInput: A layer specification of the user has no MoE layer.
        """
        if not self.changes_layers:
            return spec
        from megatron_ampipe.layers import layer

        self.num_models += 1
        changed = spec if self.gate is None else layer.with_gate(spec, self.gate)
        if self.context is not None and not is_stack:
            changed = layer.pipelined(changed, self.context)
        elif self.context is not None:
            # Not in 0.17.
            from megatron_ampipe.layers.hybrid import pipelined_stack

            changed = pipelined_stack(changed, self.context)
        if self.args.spec is not None and changed == spec:
            raise BadInput(
                "--spec",
                " ".join(self.args.spec),
                rule="there is nothing to pipeline: this layer specification has no MoE layer",
                remedy="Name one with MoE layers, or train with --ampipe-degree 1.",
            )
        return changed

    def refused_script(self, rule: str, remedy: str | None = None) -> BadInput:
        """The error that this script cannot be run with AMPipe."""
        other = "Use a script that trains a GPT or hybrid model through megatron.training.pretrain."
        return BadInput("script", self.script or "(not given)", rule=rule, remedy=remedy or other)

    def end(self) -> None:
        """Give Megatron its functions back, and write this rank's trace; also after a failure."""
        if self._hooks is not None:
            self._hooks.remove()


def names_own_flags() -> bool:
    """Whether the command line of the process has flags of AMPipe."""
    return any(word.startswith("--ampipe") for word in sys.argv)
