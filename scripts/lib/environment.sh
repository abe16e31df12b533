# shellcheck shell=bash
# The environment of all scripts; sourced, never run.
#
# The first time, it finds a Python, creates .venv in the checkout and installs the package and its dependencies.
# After that it only compares a stamp, which takes milliseconds. Sets `root` and `python`, changes to the
# checkout, and puts all caches below it, so that nothing is written anywhere else.
#
# .venv/.ampipe-stamp       what is installed; written last, so it exists only if the installation is complete
# .venv/.ampipe-installing  an installation by this script has started; still exists if it was interrupted
# .venv/.ampipe-keep-torch  the environment was made by the user, and had a torch

root=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root" || exit 1
venv=$root/.venv
python=$venv/bin/python
cache=$venv/cache
stamp=$venv/.ampipe-stamp
marker=$venv/.ampipe-installing
keep_torch=$venv/.ampipe-keep-torch
needed_gb=12

say() { printf 'ampipe: %s\n' "$*"; }

# fail SUMMARY [REMEDY...]: prints one line about the error, then what to do, and exits.
fail() {
    printf 'ampipe: %s\n' "$1" >&2
    shift
    if [ $# -gt 0 ]; then printf '    %s\n' "$@" >&2; fi
    exit 1
}

# Removes the variables of other environments. These pip variables would redirect the installation; the other pip
# settings of the machine (index, proxy, certificates) stay.
leave_other_environments() {
    unset PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_ROOT
    export PIP_USER=0
}

keep_caches_inside() {
    mkdir -p "$cache"
    export XDG_CACHE_HOME=$cache
    export CUDA_CACHE_PATH=$cache/cuda
    export HF_HOME=$cache/huggingface
    export MPLCONFIGDIR=$cache/matplotlib
    export PYTEST_DEBUG_TEMPROOT=$cache/pytest
    export TIKTOKEN_CACHE_DIR=$cache/tiktoken
    export TORCH_EXTENSIONS_DIR=$cache/torch_extensions
    export TORCH_HOME=$cache/torch
    export TORCHINDUCTOR_CACHE_DIR=$cache/inductor
    export TRITON_CACHE_DIR=$cache/triton
    export WANDB_CACHE_DIR=$cache/wandb WANDB_CONFIG_DIR=$cache/wandb
    export WANDB_DATA_DIR=$cache/wandb WANDB_DIR=$cache/wandb
    mkdir -p "$PYTEST_DEBUG_TEMPROOT" "$WANDB_DIR"
    # matplotlib lists the system's fonts, for which fontconfig writes a cache.
    export FONTCONFIG_FILE=$cache/fonts.conf
    printf '<fontconfig><cachedir>%s</cachedir><include ignore_missing="yes">%s</include></fontconfig>\n' \
        "$cache/fontconfig" /etc/fonts/fonts.conf >"$FONTCONFIG_FILE"
}

# Prints "ok VERSION PATH" for an interpreter that can run the package, otherwise "no VERSION REASON".
# Also runs on Python 2, because `python` may be one.
probe='import sys
version = "%d.%d.%d" % sys.version_info[:3]
try:
    import sysconfig
    from importlib.util import find_spec
    free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED")
    has_venv = find_spec("venv") and find_spec("ensurepip")
except ImportError:
    free_threaded, has_venv = False, False
reason = ""
if sys.version_info[:2] < (3, 12):
    reason = "is older than 3.12"
elif sys.version_info[3] != "final":
    reason = "is a pre-release"
elif free_threaded:
    reason = "is a free-threaded build"
elif not has_venv:
    reason = "lacks the venv module (Debian and Ubuntu: install python3.%d-venv)" % sys.version_info[1]
print("no %s %s" % (version, reason) if reason else "ok %s %s" % (version, sys.executable))'

# interpreters VERSION: candidates for a Python of that version, one path per line.
interpreters() {
    local each
    type -aP "python$1" python3 python 2>/dev/null || true
    for each in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$1".*/bin/"python$1"; do
        if [ -x "$each" ]; then printf '%s\n' "$each"; fi
    done
    if command -v uv >/dev/null; then
        uv python find --no-cache --no-project --no-python-downloads "$1" 2>/dev/null || true
    fi
}

# Sets `base_python`, or explains how to install a Python. 3.12 and 3.13 first: there may be no torch for newer ones.
find_python() {
    local wanted candidate answer seen=$'\n'
    rejected=()
    for wanted in 3.12 3.13 3.14 3; do
        while IFS= read -r candidate; do
            answer=$("$candidate" -c "$probe" 2>/dev/null </dev/null) || continue
            case $answer in
                "ok $wanted."*)
                    base_python=${answer#ok * }
                    base_version=${answer#ok }
                    base_version=${base_version%% *}
                    return 0
                    ;;
                "no "*)
                    case $seen in *$'\n'"$candidate"$'\n'*) continue ;; esac
                    seen=$seen$candidate$'\n'
                    answer=${answer#no }
                    rejected+=("not usable: $candidate, ${answer%% *} ${answer#* }")
                    ;;
            esac
        done < <(interpreters "$wanted")
    done
    fail "no Python 3.12 or newer was found (on PATH, among pyenv's versions, with uv)." \
        ${rejected[@]+"${rejected[@]}"} \
        "Install one in any of these ways, then run this script again:" \
        "  uv python install 3.12" \
        "  pyenv install 3.12" \
        "  conda create -n python3.12 python=3.12 && conda activate python3.12" \
        "  apt-get install python3.12 python3.12-venv     (Ubuntu 24.04)" \
        "  dnf install python3.12                         (Fedora, RHEL 9)"
}

# What the environment was made for: a virtual environment cannot be moved, nor used with another Python.
identity() {
    printf 'checkout %s\n' "$root"
    "$python" -I -S -c 'import sys; print("python %d.%d" % sys.version_info[:2])' 2>/dev/null
}

# What is installed in it, as a checksum.
inputs() { printf 'inputs %s\n' "$(cat setup.py constraints.txt | cksum)"; }

make_venv() {
    if [ -L "$venv" ]; then
        fail "$venv is a link to an environment of another folder, which would be removed." \
            "Remove the link, then run this script again: rm .venv"
    fi
    find_python
    local free_kb
    free_kb=$(df -Pk "$root" 2>/dev/null | awk 'NR == 2 { print $4 }')
    if [ "${free_kb:-999999999}" -lt $((needed_gb * 1024 * 1024)) ]; then
        say "only $((free_kb / 1024 / 1024)) GB are free here, but about $needed_gb are needed with a CUDA build of torch"
    fi
    say "creating .venv with Python $base_version ($base_python)"
    # Keeps pip's download cache of an interrupted installation, and removes everything else.
    find "$venv/" -mindepth 1 -maxdepth 1 ! -name cache ! -name .ampipe-lock -exec rm -rf {} +
    : >"$marker"
    PYTHONDONTWRITEBYTECODE=1 "$base_python" -m venv "$venv" >"$cache/install.log" 2>&1 ||
        fail "$base_python -m venv failed; the end of its output:" "$(tail -n 3 "$cache/install.log")"
}

# Prints the lines of pip's output that show its progress.
show_progress() {
    local line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$cache/install.log"
        case $line in
            *Downloading*" MB"*) case $line in *[0-9][0-9]"."[0-9]" MB"*) say "  ${line#"${line%%[! ]*}"}" ;; esac ;;
            *Downloading*" GB"*) say "  ${line#"${line%%[! ]*}"}" ;;
            "Installing collected packages"*) say "  unpacking (takes some minutes)" ;;
        esac
    done
}

explain_pip() {
    local log=$cache/install.log
    if grep -qiE 'no space left|disk quota' "$log"; then
        fail "the disk is full: $root needs about $needed_gb GB." "Free some, then run this script again."
    elif grep -qE 'NewConnectionError|ConnectTimeout|NameResolution|name resolution|ProxyError|ReadTimeout|Connection (refused|reset|aborted)|Network is unreachable' "$log"; then
        fail "the package index could not be reached." \
            "Check the network, or pip's own settings (HTTPS_PROXY, PIP_INDEX_URL, pip config list)," \
            "then run this script again."
    elif grep -q 'No matching distribution found' "$log"; then
        fail "$(grep -m 1 'No matching distribution found' "$log")" \
            "The index has no build for this Python and this system. Tested with Python 3.12 on Linux:" \
            "put it on PATH, remove .venv, and run this script again."
    fi
    fail "pip failed; the end of $log:" "$(tail -n 15 "$log")"
}

install_package() {
    say "installing torch, Megatron and the test tools into .venv (the first time: 3 to 6 GB, some minutes)"
    rm -rf "$cache/tmp"
    mkdir -p "$cache/tmp"
    : >"$cache/install.log"
    local constraints=constraints.txt
    if [ -e "$keep_torch" ]; then
        say "keeping the torch that was installed before"
        constraints=$cache/constraints.txt
        grep -v '^torch==' constraints.txt >"$constraints"
    fi
    # /tmp is often too small for what pip unpacks. The download cache, which is as large as the downloads, is only
    # needed after an interrupted installation.
    if ! TMPDIR=$cache/tmp PYTHONDONTWRITEBYTECODE=1 "$python" -m pip install --no-input \
        --disable-pip-version-check --progress-bar off --cache-dir "$cache/pip" \
        -c "$constraints" -e '.[test,tools]' 2>&1 | show_progress; then
        explain_pip
    fi
    say "checking that torch and Megatron can be imported"
    TMPDIR=$cache/tmp "$python" -c 'import torch, megatron.core' >>"$cache/install.log" 2>&1 ||
        fail "torch or Megatron cannot be imported:" "$(tail -n 5 "$cache/install.log")"
    rm -rf "$cache/pip" "$cache/tmp"
}

update_environment() {
    local known='' here
    if [ -e "$stamp" ]; then known=$(cat "$stamp"); fi
    here=$(identity) || here=missing
    if [ -e "$marker" ] && [ ! -e "$stamp" ]; then
        say "an earlier installation was interrupted; starting it again"
        make_venv
    elif [ -n "$known" ]; then
        : >"$marker"
        rm -f "$stamp"
        case $known in
            "$here"$'\n'*) say "the requirements have changed" ;;
            *)
                say "the checkout has moved or its Python has changed"
                make_venv
                ;;
        esac
    elif [ -e "$venv/pyvenv.cfg" ]; then
        # Created by the user, so packages are added and nothing is removed.
        "$python" -c 'import sys, pip; sys.exit(sys.version_info[:2] < (3, 12))' 2>/dev/null ||
            fail "$venv was not made by this script, and has no working Python 3.12 with pip." \
                "Remove or rename it, then run this script again."
        say "using the existing .venv"
        # Its torch may be the one for this machine's driver.
        if "$python" -m pip show --quiet torch >/dev/null 2>&1; then : >"$keep_torch"; fi
    else
        make_venv
    fi
    install_package
    here=$(identity)
    # The order matters: stamp and marker together mean complete, the marker alone means incomplete.
    printf '%s\n%s\n' "$here" "$(inputs)" >"$stamp.partial"
    mv "$stamp.partial" "$stamp"
    rm -f "$marker"
    say "the environment is ready"
}

ready() { [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$(identity)"$'\n'"$(inputs)" ]; }

leave_other_environments
keep_caches_inside
if ! ready; then
    # Two scripts that start at the same time must not both install.
    if command -v flock >/dev/null; then
        exec 9>"$venv/.ampipe-lock"
        flock 9
        ready || update_environment
        exec 9>&-
    else
        update_environment
    fi
fi
export VIRTUAL_ENV=$venv
export PATH=$venv/bin:$PATH
