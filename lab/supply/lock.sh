#!/bin/sh
# Renew the pinned requirements with hashes and without index lines. Needs pip-tools.
set -eu
cd "$(dirname "$0")/../.."
options="-q --generate-hashes --allow-unsafe --strip-extras --no-header --no-emit-index-url --no-emit-trusted-host --no-emit-find-links"
# shellcheck disable=SC2086  # a list of options
pip-compile $options --upgrade --extra events -o requirements/serve.txt pyproject.toml
# shellcheck disable=SC2086
pip-compile $options --upgrade --extra dev -c requirements/serve.txt -o requirements/dev.txt pyproject.toml
# shellcheck disable=SC2086
pip-compile $options --upgrade -o requirements/site.txt requirements/site.in
