# shellcheck shell=bash
# expect.sh - for scripts that run programs: a folder of its own, what a command must give, and what its JSON says.
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# expect STATUS COMMAND...: runs a command; a failure leaves standard output empty.
expect()
{
    local want=$1 got=0
    shift
    "$@" >"$dir/out" 2>"$dir/err" || got=$?
    if [ "$got" != "$want" ] || { [ "$want" != 0 ] && [ -s "$dir/out" ]; }; then
        echo "$*: exit status $got, not $want; or output on failure"
        cat "$dir/out" "$dir/err"
        exit 1
    fi
}

# json EXPRESSION: the output is one object d for which the Python expression holds.
json()
{
    python3 -c "
import json, math, sys
d = json.load(open(sys.argv[1], encoding='utf-8'))
assert $1, d" "$dir/out"
}

# json_value EXPRESSION: its value.
json_value()
{
    python3 -c "
import json, sys
d = json.load(open(sys.argv[1], encoding='utf-8'))
print($1)" "$dir/out"
}
