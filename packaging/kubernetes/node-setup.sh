#!/bin/sh
# Sets a node up for pods with runtimeClassName: fermata. As root: node-setup.sh [PACKAGE.deb]
#
# Installs the package, names the runtime to containerd and restarts containerd, each only where it is not so yet: it
# may be run again. What containerd would not load is not written. The environment variable HUGE_PAGES (always, madvise)
# sets transparent huge pages, now and from boot on.
set -eu

config=/etc/containerd/config.toml

fail() {
    echo "node-setup: $1" >&2
    exit 1
}

if [ -n "${1:-}" ]; then
    wanted=$(dpkg-deb --field "$1" Version)
    have=$(dpkg-query --show --showformat='${Version}' fermata 2>/dev/null || :)
    [ "$have" = "$wanted" ] || dpkg --install "$1"
fi
share=
for folder in /usr/local/share/fermata /usr/share/fermata; do
    [ ! -e "$folder/fermata-v3.toml" ] || share=$folder
done
[ -n "$share" ] || fail "fermata is not installed: name its package"
command -v containerd >/dev/null || fail "there is no containerd on PATH (of the node's own, not of a snap)"

# containerd's configuration with all its imports; of the file $1.
dump() {
    containerd --config "$1" config dump 2>/dev/null
}

# The tables for a configuration of version $1, with the cgroup driver of the runtime runc.
tables() {
    driver=$(dump "$config" | awk '/^ *\[/ { runc = /runtimes\.runc\.options\]/ } runc && /SystemdCgroup/ { print $3 }')
    sed "s/SystemdCgroup = false/SystemdCgroup = ${driver:-false}/" "$share/fermata-v$1.toml"
}

major=$(containerd --version | sed 's/.* v\{0,1\}\([0-9]\{1,\}\)\.[0-9].*/\1/')
if dump "$config" | grep -q 'runtimes\.fermata\]'; then
    echo "node-setup: containerd's configuration names fermata already"
else
    new=$config.fermata
    trap 'rm -f "$new"' EXIT
    if [ ! -e "$config" ]; then
        mkdir -p "${config%/*}"
        tables $((major >= 2 ? 3 : 2)) >"$new"
    elif [ "$major" -ge 2 ] && grep -Eq '^ *imports *=.*/etc/containerd/conf\.d/\*\.toml' "$config"; then
        mkdir -p /etc/containerd/conf.d
        new=/etc/containerd/conf.d/fermata.toml
        tables 3 >"$new"
    else
        # A second file would replace this one's section (1.7), or is not looked for. The drop-in's own version line is
        # left out, and the runtime runc where the file has it.
        version=$(sed -n 's/^version *= *\([0-9]*\).*/\1/p' "$config")
        {
            cat "$config"
            echo
            tables "${version:-2}" | sed '/^version = /d' | if grep -Eq 'runtimes\."?runc"?\]' "$config"; then
                sed '/^# The default, as it was/,$d'
            else
                cat
            fi
        } >"$new"
    fi
    loaded=$config
    [ "$new" != "$config.fermata" ] || loaded=$new
    if ! dump "$loaded" | grep -q 'runtimes\.fermata\]'; then
        rm -f "$new"
        fail "containerd would not load $config with fermata's tables: add those of $share/fermata-v*.toml by hand"
    fi
    if [ "$new" = "$config.fermata" ]; then
        [ ! -e "$config" ] || cp -p "$config" "$config.before-fermata"
        mv "$new" "$config"
    fi
    trap - EXIT
    if [ -d /run/systemd/system ]; then
        systemctl restart containerd
    else
        echo "node-setup: restart containerd now"
    fi
fi

if [ -n "${HUGE_PAGES:-}" ]; then
    mkdir -p /etc/tmpfiles.d
    sed "s/ madvise\$/ $HUGE_PAGES/" "$share/huge-pages.conf" >/etc/tmpfiles.d/fermata-huge-pages.conf
    [ ! -d /run/systemd/system ] || systemd-tmpfiles --create fermata-huge-pages.conf
fi

# What else the node lacks is told, not mended: CRIU comes from where the node's administrator takes it.
fermata doctor || :
