# shellcheck shell=bash
# expect.sh - for scripts that run programs: a folder of its own, and what a command must give.
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
