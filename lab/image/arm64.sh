#!/bin/sh
# Run the exporter as the image's arm64 build installs it, under emulation: the pinned wheels for aarch64 with their hashes, Debian 12's
# Python for arm64, QEMU in user mode. It prints the version and scrapes a running `serve`. Nothing is installed on this machine.
# Needs Debian 12 and its archive, about 400 MiB in build/arm64, some minutes. Usage: lab/image/arm64.sh
set -eu
cd "$(dirname "$0")/../.."
work=$PWD/build/arm64
root=$work/root
say() { echo "arm64: $*" >&2; }

mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$root"
# shellcheck disable=SC2016  # a format of apt's
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
[ -n "$mirror" ] || { say "no Debian 12 mirror among apt's sources"; exit 2; }
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" >"$work/sources.list"
apt_() {
    apt-get -q -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$work/lists" \
        -o Dir::Cache="$work/cache" -o Dir::State::status=/dev/null -o APT::Architecture=amd64 -o APT::Architectures::=arm64 \
        -o APT::Sandbox::User=root "$@"
}
if [ ! -e "$work/.packages" ]; then
    say "fetching Debian 12's Python for arm64 and QEMU"
    apt_ update >"$work/apt.log"
    set -- qemu-user-static
    for name in python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 zlib1g libexpat1 libssl3 libffi8 \
        libbz2-1.0 liblzma5 libuuid1 libcrypt1 libgcc-s1 libsqlite3-0; do
        set -- "$@" "$name:arm64"
    done
    (cd "$work/debs" && apt_ download "$@" >>"$work/apt.log")
    for package in "$work"/debs/*_arm64.deb; do dpkg -x "$package" "$root"; done
    dpkg -x "$work"/debs/qemu-user-static_*_amd64.deb "$work/qemu"
    touch "$work/.packages"
fi

say "installing the pinned wheels for aarch64"
site=$work/site
rm -rf "$site"
.venv/bin/python -m pip install -q --disable-pip-version-check --no-compile --require-hashes --only-binary=:all: --target "$site" \
    --python-version 3.11 --implementation cp --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux_2_28_aarch64 -r requirements/serve.txt 2>"$work/pip.log" || { cat "$work/pip.log" >&2; exit 1; }
cp -r exporter/kvpressure "$site/kvpressure"
foreign=$(find "$site" -name '*.so*' -exec sh -c 'for f; do od -An -tx1 -j18 -N2 "$f" | grep -q "b7 00" || echo "$f"; done' sh {} +)
[ -z "$foreign" ] || { say "not for aarch64: $foreign"; exit 1; }

run_as_this() {
    exec env -i HOME=/ PYTHONPATH="$site" PYTHONDONTWRITEBYTECODE=1 NODE_NAME=arm64 \
        "$work/qemu/usr/bin/qemu-aarch64-static" -L "$root" "$root/usr/bin/python3.11" "$@"
}
run() { (run_as_this "$@"); }
run -c 'import platform; print("arm64:", platform.machine(), "Python", platform.python_version())'
run -m kvpressure version
(run_as_this -m kvpressure serve --web.listen-address 127.0.0.1:0 --engine.target http://127.0.0.1:9 >"$work/serve.log" 2>&1) &
process=$!
trap 'kill "$process" 2>/dev/null || true' EXIT
for _ in $(seq 900); do
    address=$(sed -n 's/.*msg=listening address=\([0-9.:]*\).*/\1/p' "$work/serve.log")
    if [ -n "$address" ] && .venv/bin/python -c 'import sys, urllib.request as u
text = u.urlopen(f"http://{sys.argv[1]}/metrics", timeout=30).read().decode()
lines = [line for line in text.splitlines() if line.startswith(("kvpressure_engine_up", "kvpressure_build_info"))]
print(*(f"arm64: {line}" for line in lines), sep="\n")
sys.exit(len(lines) < 2)' "$address" 2>/dev/null >"$work/page"; then
        cat "$work/page"
        exit 0
    fi
    kill -0 "$process" 2>/dev/null || break
    sleep 1
done
say "the exporter did not come up"
cat "$work/serve.log" >&2
exit 1
