#!/usr/bin/env bash
# Usage: consumer_test.sh SOURCE subdirectory|static|shared WORK - builds and runs the programs of
# tests/consumer against libkvc: inside their own build, or installed and moved, by CMake and pkg-config.
set -euo pipefail
source=$1 kind=$2 work=$3
consumer=$source/tests/consumer

# run_all DIR: runs the consumers that were built there.
run_all()
{
    "$1/consumer_c"
    "$1/consumer_cxx"
}

rm -rf "$work"
mkdir -p "$work"

if [ "$kind" = subdirectory ]; then
    cmake -G Ninja -S "$consumer" -B "$work/cmake" -DKVC_SOURCE="$source"
    cmake --build "$work/cmake"
    run_all "$work/cmake"
    exit
fi

case $kind in
static) shared=OFF static_flag=--static ;;
shared) shared=ON static_flag= ;;
*) echo "unknown kind $kind"; exit 2 ;;
esac
cmake -G Ninja -S "$source" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=$shared \
    -DKVC_TESTS=OFF -DKVC_EXAMPLES=OFF
cmake --build "$work/build"
cmake --install "$work/build" --prefix "$work/installed"
mv "$work/installed" "$work/moved" # nothing in the package may depend on where it was

cmake -G Ninja -S "$consumer" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$work/moved"
cmake --build "$work/cmake"
run_all "$work/cmake"

pc=$(find "$work/moved" -name kvc.pc)
export PKG_CONFIG_PATH=${pc%/*}
mkdir "$work/pkgconfig"
# shellcheck disable=SC2046,SC2086
"${CC:-cc}" "$consumer/consumer.c" "$consumer/names.c" -o "$work/pkgconfig/consumer_c" \
    $(pkg-config --cflags --libs $static_flag kvc kvc_pool)
# shellcheck disable=SC2046,SC2086
"${CXX:-c++}" -std=c++17 "$consumer/consumer.cpp" -o "$work/pkgconfig/consumer_cxx" \
    $(pkg-config --cflags --libs $static_flag kvc)
LD_LIBRARY_PATH=$(pkg-config --variable=libdir kvc)
export LD_LIBRARY_PATH
run_all "$work/pkgconfig"
