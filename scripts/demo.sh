#!/usr/bin/env bash
# The main job on a real sglang 0.5.9, on a CPU: patch half of it, see INERT, patch all of it, see ACTIVE, revert.
#
# Sets up all that it needs (see README.md). Every exit code and verdict is checked here; exit 0 only if all were right.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VERSION=0.5.9
CACHE="${DYNSPEC_CACHE:-$HOME/.cache/dynspec}"
PLACE="$CACHE/envs/demo-$VERSION"
# The arguments of the incident. The two model folders hold a config.json only: weights are not needed to select the
# worker, and on a CPU `dynspec verify` constructs it with a tiny model of its own (and says so).
SERVER_ARGS=(
    --model-path scripts/demo/target --speculative-draft-model-path scripts/demo/draft --speculative-algorithm EAGLE3
    --speculative-num-steps 2 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16
    --speculative-disable-batch-threshold 5
)
# The incident happened with the release's default.
unset SGLANG_ENABLE_SPEC_V2

step() { printf '\n=== %s\n' "$*"; }

fail() {
    printf '\ndemo: FAILED: %s\n' "$*" >&2
    exit 1
}

# dynspec WANTED_EXIT_CODE ARGUMENT...: shows the command, runs it, demands the exit code.
dynspec() {
    local wanted=$1 code=0
    shift
    printf '$ dynspec %s\n' "$*" >&2
    "$DYNSPEC" "$@" || code=$?
    printf '(exit %d)\n' "$code" >&2
    [ "$code" -eq "$wanted" ] || fail "exit $code where $wanted was due: dynspec $*"
}

# verdict WANTED_EXIT_CODE VERDICT WORD...: asks `dynspec verify`; demands the verdict, and each word in its JSON.
verdict() {
    local code=$1
    shift
    # With --json the object goes to stdout and the text for people to stderr.
    dynspec "$code" verify --json --python "$SERVING" -- "${SERVER_ARGS[@]}" >"$WORK/verify.json"
    "$TOOL_PYTHON" - "$WORK/verify.json" "$@" <<'PY' || fail "not the verdict that was due"
import json
import sys

path, wanted, *words = sys.argv[1:]
with open(path, encoding="utf-8") as stream:
    answer = json.load(stream)
missing = [word for word in words if word not in json.dumps(answer)]
if answer["verdict"] != wanted or missing:
    sys.exit(f"expected {wanted} naming {words}, missing {missing}; the answer was {json.dumps(answer, indent=1)}")
PY
}

# digest: one sha256 over all of sglang's files but bytecode.
digest() {
    (cd "$SGLANG" && find . -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-64)
}

step "1. Set up: dynspec, and a CPU environment with sglang $VERSION (a few minutes the first time)"
DYNSPEC=$(python3 scripts/setup.py tool)
TOOL_PYTHON="$(dirname "$DYNSPEC")/python"
mkdir -p "$CACHE/locks"
exec 9>"$CACHE/locks/demo"
flock -n 9 || fail "another demo is running with the cache $CACHE"
SERVING=$(python3 scripts/setup.py env "$VERSION" --at "$PLACE")
SGLANG="$PLACE/lib/python3.11/site-packages/sglang"
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
BEFORE=$(digest)
"$DYNSPEC" --version

step "2. What a full patch would change (nothing is written)"
dynspec 0 patch --python "$SERVING" --dry-run
[ "$(digest)" = "$BEFORE" ] || fail "the dry run wrote something"

step "3. Patch only what the old script patched: server_args.py and eagle_worker_v2.py"
dynspec 0 patch --python "$SERVING" --only server_args --only eagle_worker_v2

step "4. Is the switch active? It must say INERT, and why"
verdict 1 INERT EAGLEWorker srt/speculative/eagle_worker.py SGLANG_ENABLE_SPEC_V2

step "5. Patch in full"
dynspec 0 patch --python "$SERVING"

step "6. And now? It must say ACTIVE"
verdict 0 ACTIVE EAGLEWorker srt/speculative/eagle_worker.py 'Dynamic speculation disable enabled: threshold=5'

step "7. Revert: every file of sglang is again what its wheel holds"
dynspec 0 revert --python "$SERVING"
[ "$(digest)" = "$BEFORE" ] || fail "revert did not bring back the same bytes"
python3 scripts/setup.py pristine "$VERSION" --at "$PLACE" || fail "sglang is not what its wheel holds"

printf '\ndemo: all as it must be. Half patched: INERT, exit 1. Fully patched: ACTIVE, exit 0. Reverted: the bytes of the wheel.\n'
