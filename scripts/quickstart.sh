#!/usr/bin/env bash
# Sets up the environment if need be, then trains a small GPT-MoE over a slow link with Megatron's layers and
# with AMPipe, and compares speed and losses. `scripts/quickstart.sh --help` lists the arguments. Paths are relative to the checkout.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail

script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do
    link=$(readlink "$script")
    case $link in /*) script=$link ;; *) script=$(dirname -- "$script")/$link ;; esac
done
# shellcheck source=scripts/lib/environment.sh
. "$(dirname -- "$script")/lib/environment.sh"

exec "$python" -m megatron_ampipe.tools.quickstart "$@"
