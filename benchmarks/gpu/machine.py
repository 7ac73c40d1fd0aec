"""The doctor's measurement of this machine, beside the rates that the planner assumes for its GPU.

    python benchmarks/gpu/machine.py --profile FILE [--toy] [--json FILE]

`--profile` is the file for the doctor's profile, which `predicted.py` reads. With several GPUs two of them measure the
engine's collectives over NCCL, and `nvidia-smi topo -m` is printed.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from ranks import keep

TOY = {"box": 0.01, "copy_bytes": 2**16, "matrix": 64, "messages": (4096, 16384), "disk_bytes": 2**16, "pair": False}


def rates(profile: Any) -> dict[str, float | None]:
    """The measured rates, in the units of `devices.toml`."""
    found = {f"{name} TFLOP/s": flops / 1e12 for name, flops in profile.matrix_flops.items()}
    found |= {"memory GB/s": profile.memory_bandwidth / 1e9, "small operation us": profile.op_seconds * 1e6}
    up, down = (None if rate is None else rate / 1e9 for rate in (profile.host_up, profile.host_down))
    return {**found, "to the GPU GB/s": up, "from the GPU GB/s": down}


def assumed(title: str, memory: int) -> dict[str, float]:
    """The rates of the planner's device of this name; empty without one."""
    from zeroshard.doctor.hardware import preset
    from zeroshard.planner.search.this_machine import nearest_preset

    name = nearest_preset(title, memory)
    if name is None:
        return {}
    device = preset(name)
    found = {f"{dtype} TFLOP/s": flops / 1e12 for dtype, flops in device.matrix_flops.items()}
    found |= {"memory GB/s": device.memory_bandwidth / 1e9, "small operation us": device.launch_seconds * 1e6}
    link = (device.host_link or 0.0) / 1e9
    return {**found, "to the GPU GB/s": link, "from the GPU GB/s": link}


def topology() -> str:
    """The links between GPUs by NVIDIA's own tool; empty without it."""
    if shutil.which("nvidia-smi") is None:
        return ""
    found = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
    return found.stdout.strip()


def main() -> None:
    """Measure, print, keep."""
    from zeroshard.doctor.checkup import findings_of
    from zeroshard.doctor.facts import gather_facts
    from zeroshard.doctor.measure import Effort, measure

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, which mean nothing")
    parser.add_argument("--json")
    options = parser.parse_args()
    facts = gather_facts(os.environ, options.profile.parent)
    effort: dict[str, Any] = TOY if options.toy else {"pair": facts.gpus > 1}
    threads = 1 if options.toy else max(1, facts.usable_cores // 2)
    profile = measure(Effort(**effort), facts, threads, lambda name: print(f"measuring {name}", file=sys.stderr))
    profile.save(options.profile)
    found, wanted = rates(profile), assumed(profile.machine, profile.device_memory)
    print(f"{profile.machine}, {profile.device_memory / 2**30:.1f} GiB, of which {profile.device_overhead / 2**20:.0f} "
          f"MiB are taken before the first tensor")  # fmt: skip
    for name, value in found.items():
        beside = f"  assumed {wanted[name]:10,.1f}" if name in wanted else ""
        print(f"{name:20} {'-' if value is None else f'{value:10,.1f}'}{beside}")
    for name, timings in profile.collectives.get("network", {}).items():
        nbytes, seconds, _ = timings[-1]
        print(f"two processes, {name:8} {nbytes:12,} bytes each {nbytes / seconds / 1e9:8.2f} GB/s")
    problems = [f"{found.level}: {found.subject}: {found.found}" for found in findings_of(facts) if found.level != "ok"]
    problems += [f"not measured: {name}: {why}" for name, why in profile.problems.items()]
    print(*problems, topology(), sep="\n")
    keep({"profile": profile.as_dict(), "rates": found, "assumed": wanted, "problems": problems}, options.json)


if __name__ == "__main__":
    main()
