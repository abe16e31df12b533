# shellcheck shell=bash
# Installs the older Megatron versions for the tests, each in a separate folder, so that a test can put it first
# on the path. Sourced by test.sh, after environment.sh; needs `root`, `venv`, `python`, `say` and `fail`.
#
# tests/older_megatron.txt                     the versions
# .venv/megatron-core-0.18/.ampipe-requirement the version in that folder; written last

install_older_megatrons() {
    local list=${root:?}/tests/older_megatron.txt requirement version folder
    [ -e "$list" ] || return 0
    while IFS= read -r requirement; do
        case $requirement in '' | '#'*) continue ;; esac
        version=${requirement#*==}
        folder=${venv:?}/megatron-core-${version%.*}
        if [ ! -e "$folder/.ampipe-requirement" ] || [ "$(cat "$folder/.ampipe-requirement")" != "$requirement" ]; then
            install_older_megatron "$requirement" "$folder"
        fi
    done <"$list"
}

install_older_megatron() {
    local requirement=$1 folder=$2 partial=$2.partial.$$
    say "installing $requirement into ${folder#"$root/"}, for the tests"
    rm -rf "$partial"
    mkdir -p "$partial"
    # Its dependencies are those of the newer version, which are installed already.
    "${python:?}" -m pip install --no-input --disable-pip-version-check --quiet --no-cache-dir --no-deps \
        --target "$partial" "$requirement" </dev/null >"$partial.log" 2>&1 ||
        fail "$requirement cannot be installed:" "$(tail -n 5 "$partial.log")"
    printf '%s\n' "$requirement" >"$partial/.ampipe-requirement"
    rm -rf "$folder" "$partial.log"
    mv "$partial" "$folder"
}
