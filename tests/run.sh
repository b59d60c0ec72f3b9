#!/usr/bin/env bash
# run.sh - every check of the project, as CI runs them; may be interrupted and repeated.
# FUZZ_SECONDS: time of each fuzz target, 60 by default.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/script.sh

export CC=gcc CXX=g++
jobs=$(nproc)
closing=()

# check PRESET: configures, builds and tests; keeps ctest's closing lines.
check()
{
    step "preset $1: build"
    cmake --preset "$1" >/dev/null
    cmake --build --preset "$1"
    step "preset $1: tests"
    ctest --preset "$1" --timeout 900 -j "$jobs" 2>&1 | tee "build/$1/ctest.txt"
    closing+=("$1: $(grep -E 'tests passed|Total Test time' "build/$1/ctest.txt" | tr -s '\n ' ' ')")
}

# fuzz TARGET: lets libFuzzer look for a failure; what it learns stays in build/fuzz/corpus.
fuzz()
{
    local name corpus seeds
    name=$(basename "$1")
    corpus=build/fuzz/corpus/$name
    seeds=tests/fuzz/corpus/$name
    mkdir -p "$corpus"
    [ -d "$seeds" ] || seeds=
    step "$name: ${FUZZ_SECONDS:-60} s"
    # shellcheck disable=SC2086
    if ! "$1" -max_total_time="${FUZZ_SECONDS:-60}" -timeout=30 -rss_limit_mb=3072 \
        -print_final_stats=1 -artifact_prefix="build/fuzz/$name-" "$corpus" $seeds \
        >"build/fuzz/$name.txt" 2>&1; then
        tail -n 60 "build/fuzz/$name.txt"
        echo "$name failed"
        exit 1
    fi
    closing+=("$name: $(grep -E '^Done' "build/fuzz/$name.txt")")
}

step "packages"
need_packages gcc g++ clang libclang-rt-dev libc6-dev binutils cmake ninja-build pkg-config \
    libcmocka-dev libopenblas-dev libpcre2-dev libpng-dev libjansson-dev libyaml-dev doxygen python3 \
    qemu-user clang-format clang-tidy
step "models and texts"
examples/fetch_models.sh gemma

for preset in dev asan tsan release; do
    check "$preset"
done

step "mutants of the CUDA kernels"
tests/cuda/mutants.py build/dev --known docs/cuda-mutants.json --write build/cuda-mutants.json
closing+=("cuda: $(grep -c '"caught": true' build/cuda-mutants.json) mutants of kernels, all caught")

step "preset fuzz: build"
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz

step "form"
find include src cuda examples tests -regex '.*\.\([ch]\|cc\|cu\|cuh\)' -print0 | xargs -0 clang-format --dry-run -Werror
step "lint"
# What is built: a file that needs a library which is not here is not.
sed -n 's/^ *"file": "\(.*\/\(src\|examples\)\/.*\.c\)",*$/\1/p' build/fuzz/compile_commands.json | sort -u |
    xargs -n 1 -P "$jobs" clang-tidy -p build/fuzz --quiet 2>/dev/null
closing+=("form and lint: no finding")

if command -v nvcc >/dev/null; then
    step "preset cuda: kernels"
    cmake --preset cuda -DKVC_WERROR=ON -DKVC_TESTS=OFF -DKVC_EXAMPLES=OFF >/dev/null
    cmake --build --preset cuda --target kvc_cuda
    closing+=("cuda: kernels compile without a warning")
else
    closing+=("cuda: no nvcc, kernels ran on the emulator only")
fi

for target in build/fuzz/bin/fuzz_*; do
    fuzz "$target"
done

step "all checks passed"
printf '%s\n' "${closing[@]}"
