#!/usr/bin/env bash
# Trains for minutes or hours with everything that can go wrong on the way, and compares the losses with those of
# an undisturbed run. Sets up the environment if necessary; `scripts/soak.sh --help` lists the arguments.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail

script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do
    link=$(readlink "$script")
    case $link in /*) script=$link ;; *) script=$(dirname -- "$script")/$link ;; esac
done
# shellcheck source=scripts/lib/environment.sh
. "$(dirname -- "$script")/lib/environment.sh"
PYTHONPATH=$root:$root/scripts exec "$python" -m soak "$@"
