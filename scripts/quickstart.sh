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

# Where tc is on many systems, and not on the path of an ordinary user.
export PATH="$PATH:/usr/sbin:/sbin"
# The root of a user namespace may make a network.
if [ "$(id -u)" != 0 ] && unshare --user --map-root-user true 2>/dev/null; then
    exec unshare --user --map-root-user -- "$python" -m megatron_ampipe.tools.quickstart "$@"
fi
exec "$python" -m megatron_ampipe.tools.quickstart "$@"
