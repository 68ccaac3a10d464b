#!/bin/sh
# Runs a script of tools/vllm with a real vLLM on the CPU at hand: with-vllm.sh SCRIPT ARGUMENT... (installs 3 GB into .vllm)
set -eu
cd "$(dirname "$0")/.."
tools/vllm/install.sh
[ -e .vllm/small-llama/config.json ] || HF_HUB_OFFLINE=1 .vllm/bin/python tools/vllm/make_model.py .vllm/small-llama small
script="tools/vllm/$1"
shift
exec .venv/bin/python "$script" "$@"
