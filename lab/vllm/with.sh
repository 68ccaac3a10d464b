#!/bin/sh
# Runs a script of lab/vllm with a real vLLM on the CPU at hand: with-vllm.sh SCRIPT ARGUMENT... (installs 3 GB into .vllm)
set -eu
cd "$(dirname "$0")/../.."
lab/vllm/install.sh
[ -e .vllm/small-llama/config.json ] || HF_HUB_OFFLINE=1 .vllm/bin/python lab/vllm/make_model.py .vllm/small-llama small
script="lab/vllm/$1"
shift
exec .venv/bin/python "$script" "$@"
