#!/usr/bin/env bash
# Usage: check_layers.sh SOURCE - includes go down only (docs/CONTRIBUTING.md): kernels see the
# kernel headers, modules never see each other or a kernel, programs see the public headers.
set -euo pipefail
shopt -s extglob
cd "$1"

# resolve FILE NAME: sets to to the file that FILE means by #include "NAME", from the top; empty if
# there is none.
resolve()
{
    local dir own
    [[ $1 == tests/cuda/* ]] && own=cuda # not the engine's headers of the same names
    to=
    for dir in "${1%/*}" ${own:-} examples/engine examples/fold examples/vlm src include tests tests/support tests/emu; do
        if [ -f "$dir/$2" ]; then
            to=$dir/$2
            [[ $to != *..* ]] || to=$(realpath --relative-to=. "$to")
            return
        fi
    done
}

# May FROM include TO? The first pattern that fits FROM decides.
allowed()
{
    local from=$1 to=$2 base=${1##*/}
    base=${base%.*}
    case $from in
    include/kvc/*) [[ $to == include/kvc/* ]] ;;
    src/pool/*) [[ $to == include/kvc/@(base|pool).h ]] ;;
    src/kernels/@(ref|simd)/*) [[ $to == src/kernels/+([^/]).h || ${to%/*} == "${from%/*}" ]] ;;
    src/kernels/*) [[ $to == include/kvc/base.h || $to == src/kernels/+([^/]).h ]] ;;
    src/cache/*) [[ $to == @(include/kvc/*|src/@(ctx|arena|balance|bits|check).h|src/kernels/+([^/]).h|src/cache/*) ]] ;;
    src/*) [[ $to == @(include/kvc/@(base|"${base%%_*}").h|src/"${base%%_*}".h|src/@(ctx|arena|balance|bits|bytes|check).h|src/kernels/+([^/]).h) ]] ;;
    cuda/*) [[ $to == @(include/kvc/*|src/@(ctx|check).h|src/kernels/+([^/]).h|cuda/*) ]] ;;
    tests/cuda/*) [[ $to == @(include/kvc/*|src/kernels/+([^/]).h|cuda/*.h|tests/*) ]] ;;
    tests/emu/*) [[ $to == @(tests/emu/*|cuda/device.cuh) ]] ;;
    tests/test_kernels*.c | tests/support/tile.h | tests/fuzz/fuzz_quant.c)
        [[ $to == @(include/kvc/*|src/kernels/+([^/]).h|tests/*) ]] ;;
    tests/*) [[ $to == @(include/kvc/*|tests/*|examples/@(engine|fold|vlm)/*) ]] ;;
    examples/@(fold|tools|vision|vlm)/*)
        [[ $to == @(include/kvc/*|examples/engine/*) || ${to%/*} == "${from%/*}" ]] ;;
    examples/*/*) [[ $to == include/kvc/* || ${to%/*} == "${from%/*}" ]] ;;
    examples/*) [[ $to == include/kvc/* ]] ;;
    esac
}

n=0 bad=0
while IFS=: read -r file line include; do
    n=$((n + 1))
    name=${include#*[<\"]}
    name=${name%%[>\"]*}
    case $include in
    *'<cuda'* | *'<cublas'*) [[ $file == @(cuda/*|include/kvc/cuda.h|tests/@(cuda|emu)/*) ]] && continue ;;
    *'<kvc/'*) allowed "$file" "include/$name" && continue ;;
    *'<'*) continue ;;
    *'"'*)
        resolve "$file" "$name"
        [ -n "$to" ] && allowed "$file" "$to" && continue
        ;;
    *KVC_TEST_HEADER*) continue ;;
    esac
    echo "$file:$line: $include breaks the layers"
    bad=1
done < <(find include src cuda tests examples -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \
    -o -name '*.cpp' -o -name '*.cc' | sort | xargs grep -nE '^ *# *include')

[ "$n" -gt 0 ] || { echo "no includes found"; exit 1; }
exit "$bad"
