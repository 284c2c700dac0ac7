#!/bin/sh
# Checks a kind of device on which the engine has not run yet: the self-test in its own dtype and in float32, parity with
# the library for the demo model and for all model families, and the engine's speed. Writes one file per step to OUT, and
# exits with status 1 if a step failed. Without steps all are run, about a quarter of an hour on a GPU.
#
#     sh tests/benchmarks/device_round.sh OUT [self-test|self-test-float32|parity|parity-float32|zoo|zoo-float32|bench]...
#
# PYTHON names the interpreter, default `uv run python`; TIMEOUT_S the seconds for each step, default 600, where the
# command `timeout` exists (macOS has none).
set -u
out=$1
limit=
command -v timeout > /dev/null && limit="timeout ${TIMEOUT_S:-600}"
shift
mkdir -p "$out"
steps=${*:-self-test self-test-float32 parity parity-float32 zoo zoo-float32 bench}

command_of() {
    case $1 in
        self-test) echo "engine --self-test" ;;
        self-test-float32) echo "engine --self-test --dtype float32" ;;
        parity) echo "tests.benchmarks.parity demo" ;;
        parity-float32) echo "tests.benchmarks.parity demo --dtype float32" ;;
        zoo) echo "tests.benchmarks.parity --zoo" ;;
        zoo-float32) echo "tests.benchmarks.parity --zoo --dtype float32" ;;
        bench) echo "tests.benchmarks.engine_bench --rounds 3" ;;
        *) return 1 ;;
    esac
}

for step in $steps; do
    command_of "$step" > /dev/null || { echo "there is no step $step" >&2; exit 2; }
done
failed=
for step in $steps; do
    $limit ${PYTHON:-uv run python} -m $(command_of "$step") > "$out/$step.txt" 2>&1
    status=$?
    echo "$step: status $status, $(tail -n 1 "$out/$step.txt")"
    [ $status -eq 0 ] || failed="$failed $step"
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
