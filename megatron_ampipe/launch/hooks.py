"""Puts AMPipe into a training script that is not ours, by wrapping what such a script calls in Megatron.

Five functions are wrapped, each a step that all of Megatron's GPT training passes through, whatever the
script around it: the parser, the check of the arguments, the model's constructor, the model's set-up, and
the training loop's entry. At degree 1 all five hand on what they are given. Nothing is decided here; checks,
table and layers are those of :mod:`.attach`. Called by :mod:`.script`, before the script is read, because
scripts import these functions by name.
"""

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import flags, host
from megatron_ampipe.launch.pretrain import record_settings
from megatron_ampipe.launch.refuse import refuse_as_bad_input, report_parser_errors

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]

REMEDY = "Use Megatron-LM's pretrain_gpt.py, or a script that trains through megatron.training.pretrain."


class Hooks:
    """One script's way through Megatron, and what AMPipe does on it.

    Args:
        script: How the user named the script, for messages.
        words: The command line behind the script, as the user gave it.
        adjustments: What the host platform added to the command line.
    """

    def __init__(self, script: str, words: Sequence[str], adjustments: Sequence[host.Adjustment]) -> None:
        self._script = script
        self._words = words
        self._adjustments = adjustments
        self._args: Any = None
        self._context: Any = None
        self._num_models = 0
        self._parsed = False
        self.training = False
        """Whether Megatron's training has begun, so that an error is no longer one of the input."""

    def install(self) -> None:
        """Wrap the five functions wherever Megatron's own modules hold them by name."""
        import megatron.training as package
        from megatron.core.models.gpt import GPTModel
        from megatron.training import arguments, initialize, training

        arguments.parse_args = self._parse(arguments.parse_args)
        arguments.validate_args = self._validate(arguments.validate_args)
        for name in ("parse_args", "validate_args"):
            if hasattr(initialize, name):
                setattr(initialize, name, getattr(arguments, name))
        GPTModel.__init__ = self._build(GPTModel.__init__)
        training.setup_model_and_optimizer = self._set_up(training.setup_model_and_optimizer)
        package.pretrain = training.pretrain = self._train(training.pretrain)

    def require_reached(self) -> None:
        """Refuse a script that has ended without AMPipe's having had a part in it.

        Raises:
            BadInput: It read its arguments by other means than Megatron's, or built no GPT model.
        """
        if not self._parsed:
            self._refuse(
                "it did not read its arguments with Megatron's parser, so no flag of AMPipe was read"
            )
        if self._context is not None and self._num_models == 0:
            self._refuse("it built no GPT model of Megatron's, so nothing was pipelined")

    def write_trace(self) -> None:
        """Write this rank's trace, if one was asked for."""
        if self._context is not None:
            from megatron_ampipe.launch.trace import write_trace

            write_trace(self._context)

    def _refuse(self, rule: str) -> None:
        raise BadInput("script", self._script, rule=rule, remedy=REMEDY)

    def _parse(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's ``parse_args``, with our flags."""

        @functools.wraps(parse)
        def parsing(extra_args_provider: Provider | None = None, *args: Any, **kwargs: Any) -> Any:
            def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
                report_parser_errors(parser)
                parser = extra_args_provider(parser) if extra_args_provider is not None else parser
                return flags.add_arguments(parser)

            self._parsed = True
            with refuse_as_bad_input():
                parsed = parse(provide, *args, **kwargs)
            # A --yaml-cfg replaces all flags. That is the user's business until one of them is ours.
            if any(word.startswith("--ampipe") for word in sys.argv):
                flags.config_from_args(parsed)
            return parsed

        return parsing

    def _validate(self, validate: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's ``validate_args``, then our checks, the start-up table, and the run's record."""

        @functools.wraps(validate)
        def validating(args: Any, *rest: Any, **kwargs: Any) -> Any:
            from megatron_ampipe.launch.attach import prepare
            from megatron_ampipe.launch.checkpoints import check_checkpoint
            from megatron_ampipe.launch.data_paths import check_data_paths
            from megatron_ampipe.launch.exit_signal import keep_from_children

            with refuse_as_bad_input():
                validated = validate(args, *rest, **kwargs)
            check_data_paths(args, of_script=True)
            check_checkpoint(args)
            keep_from_children(args)
            self._args = args
            self._context = prepare(args, adjustments=self._adjustments)
            record_settings(self._words, self._adjustments, script=self._script)
            return validated

        return validating

    def _build(self, construct: Callable[..., None]) -> Callable[..., None]:
        """``GPTModel.__init__`` with the MoE layers of its specification pipelined."""

        @functools.wraps(construct)
        def constructing(
            model: Any, config: Any, transformer_layer_spec: Any, *args: Any, **kwargs: Any
        ) -> None:
            if self._context is not None:
                from megatron_ampipe.layers.spec import pipelined

                transformer_layer_spec = pipelined(transformer_layer_spec, self._context)
                self._num_models += 1
            construct(model, config, transformer_layer_spec, *args, **kwargs)

        return constructing

    def _set_up(self, set_up: Callable[..., Any]) -> Callable[..., Any]:
        """``setup_model_and_optimizer``, whose models have to be ours before the first iteration."""

        @functools.wraps(set_up)
        def setting_up(*args: Any, **kwargs: Any) -> Any:
            made = set_up(*args, **kwargs)
            if self._context is not None:
                from megatron.core.models.gpt import GPTModel
                from megatron.core.utils import unwrap_model

                kinds = {type(chunk) for chunk in unwrap_model(made[0])}
                if self._num_models == 0 or not all(issubclass(kind, GPTModel) for kind in kinds):
                    names = " and ".join(sorted(kind.__name__ for kind in kinds))
                    self._refuse(f"it trains a {names}, and only GPT models can be pipelined")
            return made

        return setting_up

    def _train(self, pretrain: Callable[..., Any]) -> Callable[..., Any]:
        """``pretrain`` with a forward step that tells the recorder which iteration it is in."""
        signature = inspect.signature(pretrain)

        @functools.wraps(pretrain)
        def training(*args: Any, **kwargs: Any) -> Any:
            from megatron_ampipe.launch.trace import recorded_when_called

            self.training = True
            bound = signature.bind(*args, **kwargs)
            bound.arguments["forward_step_func"] = recorded_when_called(
                bound.arguments["forward_step_func"], lambda: (self._context, self._args)
            )
            return pretrain(*bound.args, **bound.kwargs)

        return training
