"""Wrong settings, each with a part of its message: read by the test and by its worker process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wrong:
    """One wrong input.

    Attributes:
        says: What the message holds; ``{line}`` stands for the file with the number of the line.
        yaml: A file, if the fault is in one.
        words: Of the command line.
    """

    says: str
    yaml: str | None = None
    words: tuple[str, ...] = ()


WRONG = {
    # Keys.
    "key-misspelt": Wrong(
        "{line}1: num-layer: there is no such flag. Did you mean num-layers", "num-layer: 2"
    ),
    "key-underscores": Wrong(
        "{line}2: num_layers: there is no such flag. Did you mean num-", "# one\nnum_layers: 2"
    ),
    "key-nothing-like-it": Wrong("qqqq: there is no such flag. Run with --help", "qqqq: 2"),
    "key-negated": Wrong(
        "rope-fusion: there is no such flag. Did you mean no-rope-fusion", "rope-fusion: false"
    ),
    "key-twice": Wrong("{line}2: YAML: the key 'lr' comes twice", "lr: 1\nlr: 2"),
    "key-twice-by-another-name": Wrong(
        "{line}2: persistent-save-interval: sets the same as save-interval",
        "save-interval: 1\npersistent-save-interval: 2",
    ),
    "key-no-setting": Wrong("help: is not a setting. Leave it out", "help: true"),
    # Values.
    "word-for-whole-number": Wrong(
        "num-layers: 'twelve': invalid int value. Give a whole number, without", "num-layers: twelve"
    ),
    "word-for-number": Wrong("lr: 'fast': invalid float value. Give a number, for ex", "lr: fast"),
    "yes-for-switch": Wrong(
        "swiglu: 'yes': is a switch, and takes true or false without quotes. Write 'swiglu: true'",
        "swiglu: yes",
    ),
    "switch-for-number": Wrong("num-layers: True: takes only numbers and text, and", "num-layers: true"),
    "choice-case": Wrong("normalization: 'rmsnorm': invalid choice. Use one of: ", "normalization: rmsnorm"),
    "choice-of-enum": Wrong(
        "attention-backend: 'flsh': invalid choice. Use one of: flash, fused",
        "attention-backend: flsh",
    ),
    "list-for-one-value": Wrong(
        "num-layers: [2,3]: takes one value, and this is a list", "num-layers: [2, 3]"
    ),
    "list-for-pattern": Wrong(
        "moe-layer-freq: [0,1]: takes one value, and this is a list",
        "moe-layer-freq: [0, 1]",
    ),
    "no-pattern": Wrong("moe-layer-freq: 'often': invalid moe_freq_type value", "moe-layer-freq: often"),
    "too-few": Wrong("rampup-batch-size: expected 3 arguments", "rampup-batch-size: [1, 2]"),
    "empty-list": Wrong("recompute-modules: expected at least one", "recompute-modules: []"),
    "list-in-list": Wrong("takes only numbers and text", "recompute-modules: [[moe]]"),
    "no-value": Wrong(
        "{line}2: load: (empty): takes only numbers and text, and words",
        "lr: 1\nload:\n",
    ),
    "mapping": Wrong("takes only numbers and text, and words", "lr:\n  max: 1"),
    # Sections.
    "own-at-top": Wrong("degree: is a setting of AMPipe. Write 'degree: ...' below 'ampipe:'", "degree: 4"),
    "own-with-prefix-at-top": Wrong("Write 'degree: ...' below 'ampipe:'", "ampipe-degree: 4"),
    "own-misspelt": Wrong(
        "{line}3: ampipe.degre: there is no such setting of AMPipe. Did you mean degree",
        "lr: 1\nampipe:\n  degre: 4",
    ),
    "own-without-effect": Wrong(
        "{line}2: --ampipe-schedule moe-only: has no effect at --ampipe-degree 1",
        "ampipe:\n  schedule: moe-only",
    ),
    "own-degree-word": Wrong(
        "{line}2: ampipe.degree: 'four': is neither a whole number nor auto.",
        "ampipe:\n  degree: four",
    ),
    "own-degree-0": Wrong("{line}2: --ampipe-degree 0: must be", "ampipe:\n  degree: 0"),
    "own-no-section": Wrong(
        "ampipe: is a section for settings of AMPipe. Write 'degree: 4' below it", "ampipe: 4"
    ),
    "flag-in-own-section": Wrong(
        "ampipe.num-layers: is a flag of Megatron. Write 'num-layers: ...' outside",
        "ampipe:\n  num-layers: 4",
    ),
    "file-in-file": Wrong("ampipe.config: a file cannot name further files", "ampipe:\n  config: tiny"),
    "next-to-flags": Wrong(
        "{line}3: lr: stands outside the section 'flags:', and would not be read",
        "flags:\n  num-layers: 2\nlr: 1",
    ),
    "cluster-without-flags": Wrong(
        "{line}2: ranks_per_node: a cluster file without a section 'flags:' has no setting of a launch.",
        "description: x\nranks_per_node: 8",
    ),
    # Files.
    "tab": Wrong("{line}2: YAML: found character '\\t'", "ampipe:\n\tdegree: 4"),
    "no-colon": Wrong("{line}1: top: does not hold keys with values", "num-layers 4"),
    "empty-file": Wrong("{line}1: top: does not hold keys with values", "# nothing\n"),
    "object": Wrong(
        "{line}1: YAML: could not determine a constructor", "lr: !!python/object/apply:os.getcwd []"
    ),
    "file-misspelt": Wrong(
        "mixtral-8x7: is neither a file nor a built-in configuration. Did you mean mixtral-8x7b?",
        words=("--ampipe-config", "mixtral-8x7"),
    ),
    "no-file": Wrong(
        "--ampipe-config (no file): takes at least one file", words=("--ampipe-config", "--lr", "1")
    ),
    # Flags.
    "flag-misspelt": Wrong(
        "argument --num-layerss 2: there is no such flag. Did you mean --num-layers",
        words=("--num-layerss", "2"),
    ),
    "flag-underscores": Wrong("Did you mean --num-layers", words=("--num_layers", "2")),
    "flag-shortened": Wrong("Did you mean --ampipe-degree", words=("--ampipe-deg", "4")),
    "flag-word": Wrong(
        "--num-layers 'two': invalid int value. Give a whole number", words=("--num-layers", "two")
    ),
    "flag-no-value": Wrong(
        "--lr (no value): expected one argument. Write a value after the flag", words=("--lr", "--swiglu")
    ),
    "flag-switch-with-value": Wrong(
        "argument true: is unexpected. A switch such as --swiglu takes no value",
        words=("--swiglu", "true"),
    ),
    "flag-choice-of-enum": Wrong(
        "--attention-backend 'flsh': invalid choice. Use one of: flash", words=("--attention-backend", "flsh")
    ),
    "megatrons-own-yaml": Wrong(
        "--yaml-cfg x.yaml: replaces every flag, those of AMPipe included. Give the settings as flags, or in",
        words=("--yaml-cfg", "x.yaml"),
    ),
    "megatrons-own-yaml-in-a-file": Wrong("{line}1: --yaml-cfg x.yaml: replaces", "yaml-cfg: x.yaml"),
    "flag-and-a-file": Wrong(
        "--num-layers 'two': invalid int value", "num-layers: 2", ("--num-layers", "two")
    ),
}

WRONG_LAUNCHES = {
    "warm-up-too-long": (["--train-iters", "4"], "--lr-warmup-iters 20: is not less than the 4 iterations"),
    "no-iterations": ([], "--train-iters (not given): training needs it"),
    "refused-combination": (
        ["--train-iters", "30", "--fine-grained-activation-offloading", "--ampipe-degree", "4"],
        "--fine-grained-activation-offloading True: with --ampipe-degree",
    ),
    "megatrons-own-check": (["--train-iters", "30", "--global-batch-size", "3"], "(refused by Megatron)"),
    "heads-do-not-divide": (
        ["--train-iters", "30", "--hidden-size", "130"],
        "assert args.hidden_size % args.num_attention_heads == 0. The check is at ",
    ),
}
"""Words after ``--ampipe-config tiny quickstart --mock-data`` on 2 ranks, and a part of the message."""

LAUNCHES = {
    "tiny": ("quickstart", 2, ["--train-iters", "30"]),
    "gpt-moe-base": ("one-node", 8, []),
    "gpt-moe-medium": ("one-node", 8, []),
    "gpt-moe-large": ("one-node", 8, []),
    "gpt-moe-xl": ("one-node", 8, []),
    "mixtral-8x7b": ("one-node", 8, []),
    "mixtral-8x22b": ("one-node", 8, []),
    "deepseek-v2-lite": ("one-node", 8, []),
    "deepseek-v3-like": ("one-node", 64, []),
    "qwen3-30b-a3b-like": ("many-nodes", 64, []),
}
"""For every model: a run for it, the number of ranks, and further words."""
