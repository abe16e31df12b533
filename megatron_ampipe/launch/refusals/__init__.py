"""The tables of combinations of settings that AMPipe does not support. Imports neither torch nor Megatron.

One file for each subject. docs/supported.md is generated from them. Problems in files or modules are refused
where these are read.
"""

from megatron_ampipe.launch.refusals.check import (
    REFUSALS,
    refuse_unsupported,
    refuse_with_token_ids,
    setting_of_plan,
    unsupported,
)
from megatron_ampipe.launch.refusals.memory import offloads_experts
from megatron_ampipe.launch.refusals.refusal import Refusal
from megatron_ampipe.launch.refusals.token_ids import TOKEN_ID_REFUSALS
