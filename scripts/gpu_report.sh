#!/usr/bin/env bash
# Everything that only a GPU can tell, in under 25 minutes: native tests, kernels, the engine.
#
#   scripts/gpu_report.sh [--quick]
#
# From the repository's root, where JAX has CUDA (pip install -e '.[dev,cuda]'). Results are JSON under
# benchmarks/results/, with the device's name in the file names. A part that fails is reported at the end, with a
# nonzero exit status; the others run all the same. --quick is a look at a CPU: tiny shapes, interpreted.
# PYTHON is the interpreter, python by default.

set -u
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-python}"
quick=()
[[ "${1:-}" == --quick ]] && quick=(--quick)

device=$("$python" -c "
import jax, re
print(jax.default_backend(), re.sub('[^a-z0-9]+', '-', jax.devices()[0].device_kind.lower()).strip('-'))
") || exit 1
read -r backend device <<<"$device"
if [[ "$backend" != gpu && ${#quick[@]} -eq 0 ]]; then
    echo "error: JAX runs on $backend, not on a GPU; --quick has a look at tiny shapes" >&2
    exit 2
fi
results="benchmarks/results"
failures=()

# part NAME SECONDS COMMAND...: a command that may take so long.
part() {
    local name="$1" limit="$2" start=$SECONDS status=0
    shift 2
    echo "== $name (at most $limit s): $*"
    timeout --kill-after=15 "$limit" "$@" || status=$?
    echo "== $name: status $status after $((SECONDS - start)) s"
    ((status == 0)) || failures+=("$name (status $status)")
}

# tests ARGUMENTS...: pytest, to which it is no failure that no test was selected.
tests() {
    local status=0
    "$python" -m pytest -q -m accelerator "$@" || status=$?
    ((status == 5)) && status=0
    return "$status"
}
export -f tests
export python

kernels=(xla)
[[ "$backend" == gpu ]] && kernels=(xla mosaic_gpu,xla)

part "native tests of kernels" 360 bash -c 'tests "$@"' tests tests/kernels
part "native tests of the rest" 120 bash -c 'tests "$@"' tests tests --ignore=tests/kernels
part "kernels" 480 "$python" scripts/bench_kernels.py "${quick[@]}" --output "$results/kernels-$device.json"
for choice in "${kernels[@]}"; do
    part "engine, $choice" 240 "$python" scripts/bench_device.py "${quick[@]}" --kernels "$choice" \
        --output "$results/device-$device-${choice%%,*}.json"
done

if ((${#failures[@]})); then
    printf 'failed: %s\n' "${failures[@]}" >&2
    exit 1
fi
echo "all parts succeeded; results are in $results/*-$device*.json"
