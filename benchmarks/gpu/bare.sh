#!/bin/sh
# Run the slices of one GPU from this checkout alone, where nothing can be installed: bare.sh [OPTIONS OF all.py].
#
# PYTHON names the interpreter, by default python3; its packages must be those of pyproject.toml, or lie in folders on
# PYTHONPATH. A torch older than the package asks for lacks all_gather_single, which gets the older name's function here;
# the page and every JSON file name the torch that ran.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
names=$(mktemp -d)
trap 'rm -rf "$names"' EXIT
cat > "$names/sitecustomize.py" <<'NAMES'
import sys


class OlderTorch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "zeroshard":
            import torch.distributed as dist

            if not hasattr(dist, "all_gather_single"):
                dist.all_gather_single = dist.all_gather_into_tensor


sys.meta_path.insert(0, OlderTorch)
NAMES
PYTHONPATH="$names:$root/src:$root/tests${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" "$root/benchmarks/gpu/all.py" "$@"
