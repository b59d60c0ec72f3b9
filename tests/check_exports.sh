#!/usr/bin/env bash
# Usage: check_exports.sh LIBRARY HEADER... - a shared library exports exactly the KVC_API functions
# of the headers; an archive defines them, and no global symbol without the prefix kvc_.
set -euo pipefail
library=$1
shift
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# KVC_0 is the version node of kvc.map.
case $library in
*.a) nm -g --defined-only "$library" ;;
*) nm -D --defined-only "$library" ;;
esac | awk 'NF == 3 {sub(/@.*/, "", $3); print $3}' | grep -v '^KVC_0$' | sort -u >"$dir/defined"
cat "$@" | tr '\n' ' ' | grep -o 'KVC_API [^;(]*(' | grep -o 'kvc_[a-z0-9_]*(' | tr -d '(' |
    sort -u >"$dir/declared"
[ -s "$dir/declared" ] || { echo "no KVC_API function in $*"; exit 1; }

case $library in
*.a)
    if grep -v '^kvc_' "$dir/defined"; then
        echo "$library: global symbols without the prefix kvc_ (above)"
        exit 1
    fi
    if comm -23 "$dir/declared" "$dir/defined" | grep .; then
        echo "$library: declared but not defined (above)"
        exit 1
    fi
    ;;
*)
    diff -u "$dir/declared" "$dir/defined" || {
        echo "$library: - declared, not exported; + exported, not declared"
        exit 1
    }
    ;;
esac
