#!/usr/bin/env bash
# Usage: readme_test.sh README.md PROGRAM.c - the README's first C block is the program, line by line.
set -euo pipefail
block=$(awk '/^```/ {if (on) exit; on = /^```c$/; next} on' "$1")
[ -n "$block" ] || { echo "$1: no C block"; exit 1; }
[ "$(wc -l <<<"$block")" -le 25 ] || { echo "$1: the program has more than 25 lines"; exit 1; }
diff -u "$2" - <<<"$block"
