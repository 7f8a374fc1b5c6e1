#!/usr/bin/env bash
# Lint, types and all tests, on real sglang 0.5.9 and 0.5.12 on a CPU. Sets up all that it needs (see README.md).
#
#     scripts/test.sh [--quick] [PYTEST ARGUMENTS]
#
# --quick leaves out what needs a real sglang environment (and does not build one).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run() {
    printf '$ %s\n' "$*"
    "$@"
}

quick=
if [ "${1:-}" = --quick ]; then
    quick=1
    shift
fi

BIN=$(dirname "$(python3 scripts/setup.py tool)")
run "$BIN/ruff" check .
run "$BIN/mypy" --strict patcher scripts/setup.py
if [ -n "$quick" ]; then
    run "$BIN/python" -m pytest -m 'not sglang' "$@"
    exit
fi

run python3 scripts/setup.py env 0.5.9 0.5.12
export DYNSPEC_ENVS="${DYNSPEC_CACHE:-$HOME/.cache/dynspec}/envs"
code=0
run "$BIN/python" -m pytest "$@" || code=$?
# The environments are shared: a test that patches takes a copy.
for version in 0.5.9 0.5.12; do
    if ! python3 scripts/setup.py pristine "$version"; then
        printf 'test.sh: FAILED: a test changed the shared environment of sglang %s\n' "$version" >&2
        code=1
    fi
done
exit "$code"
