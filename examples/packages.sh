# packages.sh - for the scripts: need_packages NAME... installs the Debian packages that are missing.
# shellcheck shell=bash
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
