#!/usr/bin/env bash
# Draws the dashboards with Grafana's own libraries (npm, about 450 MB the first time) in Chromium. Optional: no test needs it.
# With --incidents first: the first screens of the incident dashboard and of the exporter's page in the demo's five incidents.
set -euo pipefail
cd "$(dirname "$0")"
command -v npm >/dev/null || { echo "render-dashboards: npm is not installed (Debian: apt install npm)" >&2; exit 2; }
[ -d node_modules/@grafana/ui ] || npm install --legacy-peer-deps --ignore-scripts --no-audit --no-fund
node_modules/.bin/esbuild dashboard.jsx --bundle --format=esm --target=es2022 --minify --outfile=build/dashboard.js --log-level=warning \
  --define:process.env.NODE_ENV='"production"' --loader:.svg=dataurl --loader:.ttf=empty
if [ "${1:-}" = --incidents ]; then
  shift
  exec ../../.venv/bin/python incidents.py "$@"
fi
exec ../../.venv/bin/python render.py "$@"
