"""Recipes and job scripts in NVIDIA's forms, read without running anything."""

import shlex
from pathlib import Path

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.flag_files import FlagFile, read_flag_file

RECIPE = """\
DEPENDENCIES:
  dockerfile: |
    RUN pip install something
ENV_VARS:
  NVTE_FUSED_ATTN: '1'
  OUTPUT: /shared/out
ARGS:
  num_layers: 4
  moe_layer_freq: ([0]*1 + [1]*3)
  bf16: true
  moe_router_pre_softmax: false
  recompute_modules: moe_act layernorm
  offload_modules:
  - expert_fc1
  - moe_act
  lr: 3.9e-06
  save: ${OUTPUT}/checkpoints
  load: ${NOWHERE_SET}
"""

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=4   # of a node
TP=${TP:-"2"}
NNODES=${NODES_OF_NOBODY:-"2"}
RANKS=$(($GPUS*$NNODES))
say() {
    MODEL_ARGS=(--num-layers 99)
}
for word in a b; do
    MODEL_ARGS+=(--num-layers 98)
done
LAUNCH=(
    --nproc_per_node $GPUS
    --nnodes $NNODES
)
MODEL_ARGS=(
    --num-layers 4   # a comment
    --moe-layer-freq '([0]*1 + [1]*3)'
    "--lr 1e-4"
    --bf16 \\
)
TEXT=" \\
    --tensor-model-parallel-size ${TP} \\
    --seq-length 128 \\
"
if [ -n "${TOKEN_OF_NOBODY}" ]; then
    MODEL_ARGS+=(--wandb-project x)
fi
if [[ $TP == 2 ]]; then MODEL_ARGS+=(--sequence-parallel); else MODEL_ARGS+=(--no-bias-gelu-fusion); fi
if [ -d "$(pwd)/x" ]; then
    MODEL_ARGS+=(--hidden-size 1)
fi
echo "pretrain_gpt.py --num-layers 97"
cat <<EOF
MODEL_ARGS=(--num-layers 96)
EOF
torchrun ${LAUNCH[@]} pretrain_gpt.py ${MODEL_ARGS[@]} $TEXT \\
    --data-path $1 --global-batch-size $RANKS --save "$(date)/x" 2>&1 | tee log.txt
"""


def read(folder: Path, text: str, name: str = "job.sh") -> FlagFile:
    (folder / name).write_text(text)
    return read_flag_file(folder / name)


def test_a_recipe_becomes_the_words_of_a_command_line(tmp_path: Path) -> None:
    file = read(tmp_path, RECIPE, "bf16_64GPU_TP2.yaml")
    assert shlex.join(file.words) == (
        "--num-layers 4 --moe-layer-freq '([0]*1 + [1]*3)' --bf16 --recompute-modules moe_act layernorm "
        "--offload-modules expert_fc1 moe_act --lr 3.9e-06 --save /shared/out/checkpoints"
    )
    assert file.ranks == 64 and file.environment["NVTE_FUSED_ATTN"] == "1"
    assert file.flags[0].place == f"{tmp_path}/bf16_64GPU_TP2.yaml:8"
    (note,) = file.notes
    assert note.endswith("bf16_64GPU_TP2.yaml:18: --load is left out: the variable NOWHERE_SET is not set")


def test_keys_of_megatrons_tests_are_flags_too(tmp_path: Path) -> None:
    file = read(tmp_path, "MODEL_ARGS:\n  --num-layers: 4\n  --swiglu: true\n", "model_config.yaml")
    assert file.words == ("--num-layers", "4", "--swiglu") and file.ranks is None


def test_a_job_script_becomes_the_words_of_its_training_command(tmp_path: Path) -> None:
    file = read(tmp_path, SCRIPT)
    assert shlex.join(file.words) == (
        "--num-layers 4 --moe-layer-freq '([0]*1' + '[1]*3)' --lr 1e-4 --bf16 --sequence-parallel "
        "--tensor-model-parallel-size 2 --seq-length 128 --global-batch-size 8"
    )
    assert (file.ranks, file.gpus_per_node) == (8, 4)
    assert file.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    said = [note.removeprefix(f"{tmp_path}/job.sh:") for note in file.notes]
    assert said == [
        "9: say is not read: functions are not followed",
        "12: for is not read: loops and case are not followed",
        "34: MODEL_ARGS=(...) is not read: it is not known whether this part runs",
        "41: --data-path is left out: the value of $1 is not known",
        "41: --save is left out: the value of $(date) is not known",
    ]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("--num-layers 4 \\\n  --bf16\n", "--num-layers 4 --bf16"),
        ('ARGS="--num-layers 4\n  --bf16"\n', "--num-layers 4 --bf16"),
        ("A=(--nnodes 2)\nB=(--bf16)\nB+=(--lr 1)\n", "--bf16 --lr 1"),
        ('CMD="python pretrain_gpt.py --bf16"\nsrun bash -c "${CMD}"\n', "--bf16"),
        ("python -u a/b/pretrain_gpt.py --lr=1 '--wandb-exp-name' 'a b'", "--lr=1 --wandb-exp-name 'a b'"),
        ("[ 1 -gt 0 ] && X=(--bf16) || X=(--fp16)\npython x.py ${X[@]} --lr 1", "--bf16 --lr 1"),
        ("if false; then L=2; elif [ a != b ]; then L=3; else L=4; fi\n--num-layers $L\n", "--num-layers 3"),
    ],
)
def test_forms_of_scripts(script: str, words: str, tmp_path: Path) -> None:
    assert shlex.join(read(tmp_path, script).words) == words


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.yaml", "num-layers: 4\n", "a.yaml:1: ARGS: is missing"),
        ("a.yaml", "ARGS: 4\n", "a.yaml:1: ARGS: is a section"),
        ("a.yaml", "ARGS:\n  a:\n    b: 1\n", "a.yaml:2: a: is a section"),
        ("a.sh", "echo nothing\n", "has no flags of Megatron"),
        ("a.sh", "A='--bf16\n", "a.sh:1: ': is not closed"),
        ("a.sh", "A=(--bf16\n", "is not closed"),
    ],
)
def test_wrong_files_are_refused(name: str, text: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refusal:
        read(tmp_path, text, name)
    assert part in str(refusal.value)


def test_flags_can_be_left_out(tmp_path: Path) -> None:
    file = read(tmp_path, RECIPE, "a.yaml").without(["bf16", "--lr"], flag="--without")
    assert "--bf16" not in file.words and "3.9e-06" not in file.words
    with pytest.raises(BadInput, match=r"--without --save-interval: is not among the flags"):
        file.without(["save_interval"], flag="--without")


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    text = f"touch {witness}\nA=$(touch {witness})\nB=`touch {witness}`\n"
    text += "python x.py --swiglu --lr $A --bf16 $B\n"
    file = read(tmp_path, text)
    assert file.words == ("--swiglu",)
    assert not witness.exists() and len(file.notes) == 2
