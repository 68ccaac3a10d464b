#!/bin/sh
# Lay out the Python of a Debian root file system as the official Python image does: interpreter, standard library and
# pip under /usr/local, so that what the Dockerfile removes is where it looks for it. Usage: like_official.sh ROOTFS
set -eu
root=$1
lib=$root/usr/local/lib/python3.11
mkdir -p "$root/usr/local/bin"
rm -rf "$lib" # Debian makes an empty one for local packages
mv "$root/usr/lib/python3.11" "$lib"
mv "$root/usr/bin/python3.11" "$root/usr/local/bin/python3.11"
ln -sf python3.11 "$root/usr/local/bin/python3"
ln -sf python3.11 "$root/usr/local/bin/python"
rm -f "$root/usr/bin/python3" "$root/usr/bin/pip"*
rm -rf "$root/usr/lib/python3" "$root/usr/share/python3" "$root/var/cache/apt" "$root/var/lib/apt/lists"
# ensurepip looks for its wheels in /usr/share; they belong to it, as they do upstream.
mkdir -p "$lib/ensurepip/_bundled"
mv "$root/usr/share/python-wheels/"*.whl "$lib/ensurepip/_bundled/"
rmdir "$root/usr/share/python-wheels"
ln -s ../local/lib/python3.11/ensurepip/_bundled "$root/usr/share/python-wheels"
# pip itself, as it lies in the official image.
mkdir -p "$lib/site-packages"
for wheel in "$lib/ensurepip/_bundled/"pip-*.whl "$lib/ensurepip/_bundled/"setuptools-*.whl; do
    python3 -m zipfile -e "$wheel" "$lib/site-packages"
done
printf '#!/usr/local/bin/python3\nfrom pip._internal.cli.main import main\nraise SystemExit(main())\n' >"$root/usr/local/bin/pip"
chmod +x "$root/usr/local/bin/pip"
