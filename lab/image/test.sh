#!/bin/sh
# Build the image from the Dockerfile as it stands and check what is in it, without a container engine or registry.
#
# The base image cannot be fetched without a registry, so a stand-in is made with debootstrap: Debian 12 with Python laid
# out as the official Python image has it (/usr/local, with pip), tagged with the name that the Dockerfile asks for.
# Packages come from the Python index of this machine, as wheels fetched before the build; the build has no network.
# Needs root on Debian 12 with buildah, debootstrap and skopeo (installed if missing), and about 1 GiB in build/image.
# Usage: lab/image/test.sh
set -eu
cd "$(dirname "$0")/../.."
work=$PWD/build/image
base=$(sed -n 's/^ARG BASE_IMAGE=//p' Dockerfile)
image=localhost/kvpressure:test
say() { echo "image: $*" >&2; }

[ "$(id -u)" = 0 ] || { say "root is needed (debootstrap, mounts)"; exit 2; }
missing=""
for tool in buildah debootstrap skopeo; do command -v "$tool" >/dev/null 2>&1 || missing="$missing $tool"; done
if [ -n "$missing" ]; then
    say "installing$missing"
    apt-get update -qq
    # shellcheck disable=SC2086  # a list of packages
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

mkdir -p "$work/wheels"
export BUILDAH_ISOLATION=chroot
store="--root $work/store --runroot $work/run --storage-driver ${IMAGE_STORAGE_DRIVER:-overlay}"
# shellcheck disable=SC2086  # options
buildah_() { buildah $store "$@"; }

if [ ! -e "$work/base.tar" ]; then
    # shellcheck disable=SC2016  # a format of apt's
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
    [ -n "$mirror" ] || { say "no Debian 12 mirror among apt's sources"; exit 2; }
    say "making the stand-in for $base"
    rm -rf "$work/rootfs"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-distutils,python3-lib2to3,python3-pip-whl,python3-setuptools-whl,python3.11-venv bookworm "$work/rootfs" "$mirror" >"$work/debootstrap.log"
    lab/image/like_official.sh "$work/rootfs"
    tar -C "$work/rootfs" --numeric-owner --one-file-system -cf "$work/base.tar.new" .
    mv "$work/base.tar.new" "$work/base.tar"
    rm -rf "$work/rootfs"
fi
say "fetching wheels"
for list in serve build; do
    .venv/bin/python -m pip download -q --disable-pip-version-check --only-binary :all: --require-hashes \
        -r "requirements/$list.txt" -d "$work/wheels" 2>"$work/pip.log" || { cat "$work/pip.log" >&2; exit 1; }
done
printf '[global]\nno-index = true\nfind-links = /wheels\ndisable-pip-version-check = true\n' >"$work/pip.conf"

say "building"
printf 'FROM scratch\nADD base.tar /\nENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin\nCMD ["python3"]\n' >"$work/Dockerfile.base"
printf '*\n!base.tar\n' >"$work/.dockerignore"
buildah_ bud -q --layers -f "$work/Dockerfile.base" -t "localhost/$base" "$work" >/dev/null
buildah_ bud --layers --pull-never --network none --volume "$work/wheels:/wheels:ro" --volume "$work/pip.conf:/etc/pip.conf:ro" \
    -f Dockerfile -t "$image" . >"$work/build.log" 2>&1 || { tail -n 40 "$work/build.log" >&2; exit 1; }

rm -f "$work/kvpressure.tar"
buildah_ push -q "$image" "oci-archive:$work/kvpressure.tar:kvpressure:test"
container=$(buildah_ from --pull-never "$image")
trap 'buildah_ umount "$container" >/dev/null 2>&1; buildah_ rm "$container" >/dev/null 2>&1' EXIT
root=$(buildah_ mount "$container")
PYTHONPATH=. .venv/bin/python lab/image/check.py --archive "$work/kvpressure.tar" --root "$root"
