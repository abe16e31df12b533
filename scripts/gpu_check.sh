#!/usr/bin/env bash
# Checks this package on a CUDA machine with torch, without a network, in calls of less than ten minutes each.
#
#   scripts/gpu_check.sh --pack DIR      on a machine with a network: downloads the needed wheels to DIR
#   scripts/gpu_check.sh --wheels DIR    on the machine with the GPU, in a copy of this checkout
#   scripts/gpu_check.sh --help          the steps, and how several calls share them
#
# It uses the python3 on PATH, which must have torch, and installs nothing into it. To use another Python:
# PATH=/path/to/bin:$PATH scripts/gpu_check.sh ...
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail

root=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    echo "gpu_check: python3 is missing, or older than 3.12. Put a Python with torch first on PATH" >&2
    exit 1
fi
PYTHONPATH=$root:$root/scripts:$root/docs/measured${PYTHONPATH:+:$PYTHONPATH} exec python3 -m gpu_check "$@"
