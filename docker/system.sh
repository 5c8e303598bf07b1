#!/usr/bin/env bash
# System packages and user of the image.
#   system.sh build    what installs the environment
#   system.sh serve    what the server needs, and the user that runs it
set -euo pipefail

readonly USER_ID=10001 USER_NAME=sglang CACHE=${SGLANG_SPARSE_CACHE:-/cache}

# python3.12-dev: Triton compiles a launcher against Python.h. libnuma1: SGLang's kernel library loads it.
readonly BUILD_PACKAGES=(ca-certificates python3.12 python3.12-venv)
readonly SERVE_PACKAGES=(ca-certificates g++ gcc libnuma1 python3.12 python3.12-dev)

install_packages() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update
    apt-get install --yes --no-install-recommends "$@"
    rm -rf /var/lib/apt/lists/*
}

add_user() {
    groupadd --gid "$USER_ID" "$USER_NAME"
    useradd --uid "$USER_ID" --gid "$USER_ID" --create-home --shell /usr/sbin/nologin "$USER_NAME"
    # A named volume that is mounted here for the first time takes over owner and mode.
    install --directory --owner="$USER_ID" --group="$USER_ID" "$CACHE"
}

case "${1:-}" in
build) install_packages "${BUILD_PACKAGES[@]}" ;;
serve)
    install_packages "${SERVE_PACKAGES[@]}"
    add_user
    ;;
*)
    echo "system.sh: error: '${1:-}' is no step: give build or serve" >&2
    exit 2
    ;;
esac
