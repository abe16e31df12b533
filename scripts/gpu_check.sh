#!/usr/bin/env bash
# Checks this package on a CUDA machine that has torch and needs no network, within nine minutes.
#
#   scripts/gpu_check.sh --pack DIR      where there is a network: the wheels that the check needs, into DIR
#   scripts/gpu_check.sh --wheels DIR    on the machine with the GPU, in a copy of this checkout
#
# It takes the python3 of that machine, the one that has torch, and installs nothing into it. For another
# Python: PATH=/where/it/is:$PATH scripts/gpu_check.sh ...
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail

root=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    echo "gpu_check: python3 is not there, or older than 3.12. Put one that has torch first on PATH" >&2
    exit 1
fi
PYTHONPATH=$root:$root/scripts${PYTHONPATH:+:$PYTHONPATH} exec python3 -m gpu_check "$@"
