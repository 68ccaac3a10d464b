#!/bin/sh
# A real vLLM on the CPU under load, with the exporter scraping it; writes build/real-vllm.md.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p build
lab/vllm/install.sh
[ -e .vllm/small-llama/config.json ] || HF_HUB_OFFLINE=1 .vllm/bin/python lab/vllm/make_model.py .vllm/small-llama small
exec .venv/bin/python lab/vllm/session.py build/real-vllm.md "$@"
