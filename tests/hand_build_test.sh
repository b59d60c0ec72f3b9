#!/usr/bin/env bash
# Usage: hand_build_test.sh SOURCE WORK - the library also builds with one compiler call, with the
# reference kernels only, and runs the README's program.
set -euo pipefail
source=$1 work=$2
cc=${CC:-cc}

rm -rf "$work"
mkdir -p "$work"
cd "$source"
"$cc" -std=c11 -O2 -ffp-contract=off -fPIC -fvisibility=hidden -shared -DKVC_REF_ONLY -Iinclude -Isrc src/*.c src/cache/*.c src/kernels/tables.c \
    src/kernels/ref/*.c -o "$work/libkvc.so" -lm
"$cc" -Iinclude examples/readme.c -o "$work/readme" -L"$work" -lkvc
LD_LIBRARY_PATH=$work "$work/readme"
