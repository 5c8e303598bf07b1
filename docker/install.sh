#!/usr/bin/env bash
# The Python environment of the image.
#   install.sh packages VENV    makes VENV with every package of the lock file
#   install.sh project VENV     installs this project into it; downloads nothing
#   install.sh check VENV       fails unless the environment is the one that was tested
# PYTHON is the interpreter that makes VENV, LOCK the lock file.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE ROOT=${HERE%/*}
readonly PYTHON=${PYTHON:-python3.12} LOCK=${LOCK:-$HERE/requirements.lock}

fail() {
    echo "install.sh: error: $*" >&2
    exit 2
}

[[ $# == 2 ]] || fail "give a step (packages, project or check) and the environment's folder"
readonly STEP=$1 VENV=$2

case "$STEP" in
packages)
    [[ -f $LOCK ]] || fail "LOCK names no file: $LOCK"
    [[ ! -e $VENV ]] || fail "$VENV exists: remove it, or give another folder"
    command -v "$PYTHON" >/dev/null || fail "there is no $PYTHON: set PYTHON to an interpreter"
    # A failed step leaves nothing that looks like an environment.
    trap 'rm -rf "$VENV"' ERR
    "$PYTHON" -m venv "$VENV"
    # The lock is complete: what it does not name must not come in.
    "$VENV/bin/python" -m pip --disable-pip-version-check install --no-cache-dir --no-deps --require-hashes -r "$LOCK"
    ;;
project)
    [[ -x $VENV/bin/python ]] || fail "$VENV is no environment: run 'install.sh packages $VENV' first"
    "$VENV/bin/python" -m pip --disable-pip-version-check install --no-cache-dir --no-deps --no-index \
        --no-build-isolation "$ROOT"
    ;;
check)
    [[ -x $VENV/bin/python ]] || fail "$VENV is no environment: run 'install.sh packages $VENV' first"
    # From elsewhere: the project has to be found where it was installed.
    cd /
    exec "$VENV/bin/python" "$HERE/check_install.py" "$LOCK"
    ;;
*) fail "'$STEP' is no step: give packages, project or check" ;;
esac
