#!/usr/bin/env bash
# Everything that only a GPU can tell, in under 25 minutes: native tests, kernels, the engine, rollouts.
#
#   scripts/gpu_report.sh [--quick] [--again] [--parts kernels/tree_attention,rollout] [--list]
#
# From the repository's root, where JAX has CUDA (pip install -e '.[dev,cuda]'). The report consists of parts, the
# most important first. Each writes one file under benchmarks/results/, with the device's name in it, and has a limit
# of time. What a part that fails or is cut short has measured so far stays in a file *.unfinished.*; the others run
# all the same, and the exit status is nonzero. A part whose file is there is skipped, so the same command goes on
# where it was stopped.
#
#   --parts  only these, separated by commas; the beginning of a name is enough: tests, engine/Qwen2.5-7B
#   --again  also parts whose files are there
#   --list   names of parts and their limits in seconds
#   --quick  a look on a CPU: tiny shapes, kernels interpreted, files in runs/gpu_report-quick/
#
# PYTHON is the interpreter, python by default.

set -u
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-python}"

# What each may take, in seconds; with what it takes to stop all of them, less than 25 minutes.
parts=(
    "tests/tree_attention 70"
    "tests/noisy_argmax 65"
    "tests/token_logprobs 80"
    "tests/quantized_product 60"
    "tests/compaction 50"
    "tests/round_to_nearest 35"
    "kernels/tree_attention 100"
    "kernels/quantized_product 90"
    "kernels/noisy_argmax 60"
    "kernels/token_logprobs 100"
    "engine/Qwen2.5-7B/mosaic_gpu 180"
    "rollout 150"
    "tests/engine 90"
    "kernels/compaction 50"
    "kernels/round_to_nearest 50"
    "engine/Qwen2.5-7B/xla 100"
    "engine/Qwen2.5-1.5B/mosaic_gpu 65"
)
kill_after=5

quick=() again=0 wanted="" list=0
while (($#)); do
    case "$1" in
        --quick) quick=(--quick) ;;
        --again) again=1 ;;
        --list) list=1 ;;
        --parts)
            wanted="${2:-}"
            [[ -n "$wanted" ]] || { echo "error: --parts: which? --list names them" >&2 && exit 2; }
            shift
            ;;
        *) echo "error: $1 is no option; they are --quick, --again, --list and --parts NAMES" >&2 && exit 2 ;;
    esac
    shift
done
if ((${#quick[@]})); then
    parts=("${parts[@]/engine\/Qwen*/}" "engine/tiny/xla 120")
fi
chosen=()
for part in "${parts[@]}"; do
    name="${part% *}"
    [[ -n "$name" ]] || continue
    if [[ -z "$wanted" ]]; then
        chosen+=("$part")
    else
        IFS=, read -ra names <<<"$wanted"
        for prefix in "${names[@]}"; do
            [[ "$name" == "$prefix" || "$name" == "$prefix/"* ]] && chosen+=("$part") && break
        done
    fi
done
if ((${#chosen[@]} == 0)); then
    echo "error: --parts $wanted: no such part; --list names them" >&2
    exit 2
fi
if ((list)); then
    printf '%s\n' "${chosen[@]}"
    exit
fi

device=$("$python" -c "
import jax, re
print(jax.default_backend(), re.sub('[^a-z0-9]+', '-', jax.devices()[0].device_kind.lower()).strip('-'))
") || exit 1
read -r backend device <<<"$device"
if [[ "$backend" != gpu && ${#quick[@]} -eq 0 ]]; then
    echo "error: JAX runs on $backend, not on a GPU; --quick has a look at tiny shapes" >&2
    exit 2
fi
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/cache/gpu_report}" # for the next start
results="benchmarks/results"
((${#quick[@]} == 0)) || results="runs/gpu_report-quick" # no figures to keep
mkdir -p "$results"

# Files with tests of the engine, of speculation and of training that the marker selects.
engine_tests=(
    tests/engine/test_engine.py
    tests/engine/test_speculative_decoding.py
    tests/training/test_scoring.py
)

# Rollouts of configs/bench_long_tail.yaml, whose policy is warmed up first, with few shapes to compile; or of next to
# nothing.
variants="SRT,prompt lookup,quantized" marked="accelerator"
rollout_keys=(
    training.steps=4 "engine.batch_buckets=[8]" "engine.cache_buckets=[512]" "speculation.verify_buckets=[32,128]"
)
if ((${#quick[@]})); then
    variants="prompt lookup" marked="accelerator and not slow"
    rollout_keys=(
        policy.growth=null policy.shape.hidden_size=64 policy.shape.num_layers=1 policy.shape.num_heads=2
        policy.shape.num_kv_heads=1 policy.shape.mlp_size=64 warm_start.steps=2 warm_start.tokens_per_step=512
        task.problems=2 rollout.prompts_per_step=2 rollout.samples_per_prompt=2 rollout.max_response_length=48
        training.steps=1 training.pack_length=256 engine.max_slots=2 "engine.batch_buckets=[2]"
        "engine.cache_buckets=[256]" "speculation.verify_buckets=[16]" speculation.max_drafts=7
    )
fi

# command_of NAME LIMIT FILE: sets `command`. Benchmarks begin nothing shortly before their limit.
command_of() {
    local name="$1" limit="$2" output="$3" kernels="${1##*/}"
    local pytest=("$python" -m pytest -v -p no:cacheprovider -m "$marked" --junitxml="$output")
    case "$name" in
        tests/engine) command=("${pytest[@]}" "${engine_tests[@]}") ;;
        tests/*) command=("${pytest[@]}" "tests/kernels/test_${name#tests/}.py") ;;
        kernels/*)
            command=("$python" scripts/bench_kernels.py "${quick[@]}" --op "${name#kernels/}")
            command+=(--seconds $((limit - 40)) --output "$output")
            ;;
        engine/*)
            name="${name#engine/}"
            [[ "$kernels" == xla ]] || kernels="$kernels,xla"
            command=("$python" scripts/bench_device.py "${quick[@]}" --only "${name%/*}" --kernels "$kernels")
            command+=(--seconds $((limit - 60)) --output "$output")
            ;;
        rollout)
            command=("$python" scripts/bench_rollout.py --only rollout --variants "$variants")
            command+=(--output "$output" "${rollout_keys[@]}")
            ;;
    esac
}

# part NAME LIMIT: runs it, unless its file is there.
failures=() there=0
part() {
    local name="$1" limit="$2" kind=json status=0 start=$SECONDS why
    [[ "$name" == tests/* ]] && kind=xml
    local stem="$results/${name//\//-}-$device"
    if [[ -e "$stem.$kind" ]] && ((!again)); then
        echo "== $name: $stem.$kind is there"
        there=$((there + 1))
        return
    fi
    command_of "$name" "$limit" "$stem.unfinished.$kind"
    echo "== $name (at most $limit s): ${command[*]}"
    timeout --kill-after="$kill_after" "$limit" "${command[@]}" || status=$?
    echo "== $name: status $status after $((SECONDS - start)) s"
    case "$status" in
        0) mv "$stem.unfinished.$kind" "$stem.$kind" && return || why="it wrote no file" ;;
        5) why="no test was selected" ;; # says pytest
        124 | 137) why="cut short after $limit s" ;;
        *) why="status $status" ;;
    esac
    failures+=("$name ($why)")
}

for each in "${chosen[@]}"; do
    part "${each% *}" "${each##* }"
done
if ((${#failures[@]})); then
    printf 'failed: %s\n' "${failures[@]}" >&2
    exit 1
fi
echo "all parts succeeded, $there of them before; results are in $results/*-$device.*"
