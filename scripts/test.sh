#!/usr/bin/env bash
# Sets up the environment if necessary, then runs the tests. Paths are relative to the checkout.
#
#   scripts/test.sh                    all checks (lint, format, types, import rules, spelling, shell), all tests
#   scripts/test.sh [pytest args]      only pytest, with these arguments
#
# Every check runs even if an earlier one has failed; the exit code is that of the first failure.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail

script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do
    link=$(readlink "$script")
    case $link in /*) script=$link ;; *) script=$(dirname -- "$script")/$link ;; esac
done
# shellcheck source=scripts/lib/environment.sh
. "$(dirname -- "$script")/lib/environment.sh"
# shellcheck source=scripts/lib/older_megatron.sh
. "$root/scripts/lib/older_megatron.sh"
install_older_megatrons

# One thread per process: the tests start several processes and share the cores between them.
export OMP_NUM_THREADS=1

if [ $# -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi

first_failure=0
failed=()

# check NAME COMMAND...: runs the command, and prints its output only if it fails.
check() {
    local name=$1 code=0 output
    shift
    output=$("$@" 2>&1) || code=$?
    if [ "$code" -eq 0 ]; then
        printf '%-14s ok\n' "$name"
        return
    fi
    printf '%-14s FAILED (%s)\n%s\n\n' "$name" "$*" "$output"
    note_failure "$name" "$code"
}

note_failure() {
    failed+=("$1")
    if [ "$first_failure" -eq 0 ]; then first_failure=$2; fi
}

shell_scripts=()
while IFS= read -r -d '' file; do
    shell_scripts+=("$file")
done < <(find .ci/run scripts -type f \( -name '*.sh' -o -name '*.sbatch' -o -name run \) -print0 | sort -z)

check 'ruff check' "$venv/bin/ruff" check --quiet .
check 'ruff format' "$venv/bin/ruff" format --check --quiet .
check mypy "$venv/bin/mypy" --no-error-summary
check lint-imports "$venv/bin/lint-imports" --no-cache
check codespell "$venv/bin/codespell"
check shellcheck "$venv/bin/shellcheck" --external-sources "${shell_scripts[@]}"

# Two workers, each with a whole file of tests at a time: one imports or waits while the other computes. Then the
# tests whose measurements another worker would disturb.
code=0
"$python" -m pytest --durations=15 --numprocesses 2 --dist loadfile --no-loadscope-reorder -m 'not alone' tests || code=$?
if [ "$code" -ne 0 ]; then note_failure pytest "$code"; fi
code=0
"$python" -m pytest --durations=5 -m alone tests || code=$?
if [ "$code" -ne 0 ]; then note_failure 'pytest -m alone' "$code"; fi

if [ "$first_failure" -eq 0 ]; then
    echo "test.sh: all checks and tests passed"
else
    printf 'test.sh: FAILED: %s (details above)\n' "$(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
fi
exit "$first_failure"
