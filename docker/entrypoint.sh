#!/usr/bin/env bash
# Starts the server with the container's arguments, which are flags of sglang.launch_server. A first argument that is no
# flag is run as a command instead, such as: python -m sglang_sparse.calibrate --help
set -euo pipefail

readonly CACHE=${SGLANG_SPARSE_CACHE:-/cache} PORT=${SGLANG_SPARSE_PORT:-30000}

fail() {
    echo "sglang-sparse: error: $*" >&2
    exit 2
}

if [[ ${1:-} != -* ]]; then
    [[ $# -gt 0 ]] || set -- --help
    [[ $1 == -* ]] || exec "$@"
fi

for argument in "$@"; do
    case "$argument" in
    --port | --port=*) fail "--port would hide the server from the health check: set SGLANG_SPARSE_PORT instead" ;;
    esac
done
[[ $PORT =~ ^[0-9]+$ ]] || fail "SGLANG_SPARSE_PORT is '$PORT': give a port number"
[[ -d $CACHE && -w $CACHE ]] || fail "$CACHE is not writable for user $(id -u): mount a named volume there, or a folder that belongs to $(id -u)"

exec python -m sglang.launch_server --host 0.0.0.0 --port "$PORT" "$@"
