# script.sh - what the scripts share.
# shellcheck shell=bash

# step TEXT: says what comes next and how long it has taken so far.
step()
{
    printf '\n== %s (%d s)\n' "$1" "$SECONDS" >&2
}

# into FILE COMMAND...: the file appears when the command has ended well.
into()
{
    local file=$1

    shift
    "$@" >"$file.new"
    mv "$file.new" "$file"
}

# need_packages NAME...: installs the Debian packages that are missing.
need_packages()
{
    local missing=() name

    if ! command -v dpkg-query >/dev/null; then
        echo "not a Debian system: please see that there is what Debian calls $*" >&2
        return
    fi
    for name; do
        if [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null)" != installed ]; then
            missing+=("$name")
        fi
    done
    if [ ${#missing[@]} -eq 0 ]; then
        return
    fi
    if [ "$(id -u)" != 0 ]; then
        echo "please install, as root: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    echo "installing ${missing[*]}" >&2
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" \
        >/dev/null
}
