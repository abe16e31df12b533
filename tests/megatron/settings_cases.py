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
    "key-shortened": Wrong("layers: there is no such flag. Did you mean num-layers", "layers: 2"),
    "key-underscores": Wrong("{line}2: num_layers: keys are written with hyphens", "# one\nnum_layers: 2"),
    "key-dashes": Wrong(
        "--num-layers: keys are written with hyphens, and without leading dashes. Write 'num-layers'",
        "--num-layers: 2",
    ),
    "key-nothing-like-it": Wrong("qqqq: there is no such flag. Run with --help", "qqqq: 2"),
    "key-negated": Wrong(
        "Megatron only has the flag that switches it off. Write 'no-rope-fusion: true'", "rope-fusion: false"
    ),
    "key-negated-but-on": Wrong("switches it off. Leave it out: it is on", "rope-fusion: true"),
    "key-not-negatable": Wrong("no-swiglu: there is no such flag. Write 'swiglu: false'", "no-swiglu: true"),
    "key-negated-twice": Wrong("Write 'rl-partial-rollouts: false'", "no-rl-partial-rollouts: true"),
    "key-twice": Wrong("{line}2: YAML: the key 'lr' comes twice", "lr: 1\nlr: 2"),
    "key-twice-by-another-name": Wrong(
        "{line}2: persistent-save-interval: sets the same as save-interval",
        "save-interval: 1\npersistent-save-interval: 2",
    ),
    "key-no-setting": Wrong("help: is not a setting. Leave it out", "help: true"),
    # Values.
    "word-for-whole-number": Wrong(
        "num-layers: twelve: takes a whole number. Write for example 4", "num-layers: twelve"
    ),
    "exponent-for-whole-number": Wrong("Write 'train-iters: 1000000'", "train-iters: 1e6"),
    "thousands": Wrong("Write 'train-iters: 10000'", "train-iters: 10,000"),
    "fraction-for-whole-number": Wrong("num-layers: 2.5: takes a whole number", "num-layers: 2.5"),
    "word-for-number": Wrong("lr: fast: takes a number. Write for example 0.1 or 1e-4", "lr: fast"),
    "yes-for-switch": Wrong(
        "swiglu: 'yes': is a switch, and takes true or false without quotes. Write 'swiglu: true'",
        "swiglu: yes",
    ),
    "off-for-switch": Wrong("Write 'bf16: false'", "bf16: off"),
    "number-for-switch": Wrong("swiglu: '1': is a switch", "swiglu: 1"),
    "quoted-switch": Wrong("Write 'swiglu: false'", 'swiglu: "false"'),
    "switch-for-number": Wrong(
        "num-layers: true: is not a switch, and takes a value. Write for example 4", "num-layers: true"
    ),
    "switch-for-choice": Wrong(
        "normalization: false: is not a switch, and takes a value. Write LayerNorm", "normalization: false"
    ),
    "choice-case": Wrong(
        "normalization: rmsnorm: is not one of LayerNorm, RMSNorm. Write RMSNorm.", "normalization: rmsnorm"
    ),
    "choice-misspelt": Wrong("Write alltoall.", "moe-token-dispatcher-type: all-to-all"),
    "choice-of-enum": Wrong(
        "attention-backend: flsh: is not one of flash, fused, unfused, local, auto. Write flash.",
        "attention-backend: flsh",
    ),
    "choice-in-list": Wrong("Write sinkhorn.", "moe-router-load-balancing-type: [aux_loss, sinkhron]"),
    "list-for-one-value": Wrong(
        "num-layers: [2,3]: takes one value, and this is a list", "num-layers: [2, 3]"
    ),
    "list-for-pattern": Wrong("Write 'moe-layer-freq: \"[0,1]\"'", "moe-layer-freq: [0, 1]"),
    "no-pattern": Wrong("takes a number or a pattern of 0 and 1", "moe-layer-freq: often"),
    "text-for-list": Wrong("Write 'data-path: [0.5, a, 0.5, b]'", "data-path: 0.5 a 0.5 b"),
    "too-few": Wrong("rampup-batch-size: 1, 2: takes 3 values, and here are 2", "rampup-batch-size: [1, 2]"),
    "empty-list": Wrong("recompute-modules: []: is an empty list", "recompute-modules: []"),
    "list-in-list": Wrong("takes only numbers and text", "recompute-modules: [[moe]]"),
    "no-value": Wrong("{line}2: load: has no value. Give one, or leave the key out", "lr: 1\nload:\n"),
    "mapping": Wrong("lr: is not a section. Write 'lr: value' on one line", "lr:\n  max: 1"),
    # Sections.
    "own-at-top": Wrong("degree: is a setting of AMPipe. Write 'degree: ...' below 'ampipe:'", "degree: 4"),
    "own-with-prefix-at-top": Wrong("Write 'degree: ...' below 'ampipe:'", "ampipe-degree: 4"),
    "own-with-prefix": Wrong(
        "ampipe.ampipe-degree: keys are written with hyphens, and without leading dashes. Write 'degree'",
        "ampipe:\n  ampipe-degree: 4",
    ),
    "own-misspelt": Wrong(
        "{line}3: ampipe.degre: there is no such setting of AMPipe. Did you mean degree",
        "lr: 1\nampipe:\n  degre: 4",
    ),
    "own-choice": Wrong("ampipe.schedule: best: is not one of ampipe, moe-only", "ampipe:\n  schedule: best"),
    "own-without-effect": Wrong(
        "{line}2: --ampipe-schedule moe-only: has no effect at --ampipe-degree 1",
        "ampipe:\n  schedule: moe-only",
    ),
    "own-degree-word": Wrong(
        "{line}2: ampipe.degree: four: is neither a whole number nor auto. Write 'degree: 4'",
        "ampipe:\n  degree: four",
    ),
    "own-degree-0": Wrong("{line}2: --ampipe-degree 0: must be", "ampipe:\n  degree: 0"),
    "own-stack-0": Wrong("{line}3: --ampipe-stack 0: must be a whole", "ampipe:\n  degree: 2\n  stack: 0"),
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
    "flag-one-dash": Wrong("Did you mean --num-layers", words=("-num-layers", "2")),
    "flag-shortened": Wrong("Did you mean --ampipe-degree", words=("--ampipe-deg", "4")),
    "flag-word": Wrong(
        "--num-layers 'two': invalid int value. Give a whole number", words=("--num-layers", "two")
    ),
    "flag-exponent": Wrong(
        "--train-iters '1e6': invalid int value. Give a whole number, without", words=("--train-iters", "1e6")
    ),
    "flag-no-number": Wrong(
        "--lr 'fast': invalid float value. Give a number, for example", words=("--lr", "fast")
    ),
    "flag-no-value": Wrong(
        "--lr (no value): expected one argument. Write a value after the flag", words=("--lr", "--swiglu")
    ),
    "flag-switch-with-value": Wrong(
        "argument true: is unexpected. A switch such as --swiglu takes no value",
        words=("--swiglu", "true"),
    ),
    "flag-choice": Wrong("Use one of: ", words=("--ckpt-format", "zip")),
    "flag-choice-of-enum": Wrong(
        "--attention-backend 'flsh': invalid choice. Use one of: flash", words=("--attention-backend", "flsh")
    ),
    "flag-own-choice": Wrong(
        "--ampipe-schedule 'best': invalid choice. Use one of: ", words=("--ampipe-schedule", "best")
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
        "--num-attention-heads 4 with --hidden-size 130: does not divide it",
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

_JOB = ["--ampipe-config", "deepseek-v2-lite", "one-node", "--tokenizer-type", "NullTokenizer", "--mock-data"]
_SAVING = ["--save", "runs/x", "--load", "runs/x", "--exit-signal-handler", "--exit-signal", "SIGUSR1"]
PREFLIGHTS = {
    "well": [*_JOB, *_SAVING],
    "unknown": [*_JOB, "--foo"],
    "value": [*_JOB, "--lr", "abc"],
    "megatrons-own-check": [*_JOB, "--global-batch-size", "3"],
}
"""Arguments of a training run that ``ampipe sbatch`` checks for 8 ranks."""
