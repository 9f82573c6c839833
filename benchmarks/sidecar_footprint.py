"""What the sidecar costs: resident memory and CPU of `autotune run` beside a running engine.

The engine is real (the embedded model); the sidecar runs as a process of its own, at its default interval or
`--interval`. CPU time is the process's own, so that other load on the machine does not count as ours.

    .venv/bin/python -P benchmarks/sidecar_footprint.py --seconds 120
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from kvpilot.agent.launch import launched

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> dict[str, float]:
    """VmRSS and VmHWM (the peak) of /proc/PID/status."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")}


def cpu_seconds(pid: int) -> float:
    """User and system time of the process itself."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    with launched(["--pool-mb", "64"], directory=folder) as server:
        command = [
            *(sys.executable, "-P", "-m", "kvpilot.agent.cli", "run", "--mode", arguments.mode),
            *("--url", server.url, "--admin-url", server.admin_url, "--token-file", str(server.token_file)),
            *("--audit", str(folder / "audit.jsonl"), "--state", str(folder / "state.json")),
            *("--listen", "127.0.0.1:0", "--interval", str(arguments.interval), "--policy", arguments.policy),
            *("--decision", str(arguments.interval * 4)),
        ]
        with (folder / "sidecar.log").open("wb") as log:
            sidecar = subprocess.Popen(command, stderr=log)
        try:
            time.sleep(5)  # start-up is paid once
            started, cpu = time.monotonic(), cpu_seconds(sidecar.pid)
            time.sleep(arguments.seconds)
            cpu, seconds = cpu_seconds(sidecar.pid) - cpu, time.monotonic() - started
            memory = memory_mb(sidecar.pid)
            if sidecar.poll() is not None:
                raise SystemExit((folder / "sidecar.log").read_text())
        finally:
            sidecar.terminate()
            sidecar.wait(10)
    return {
        "version": version("kvpilot"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "policy": arguments.policy,
        "interval_seconds": arguments.interval,
        "seconds": round(seconds, 1),
        "resident_mb": round(memory["VmRSS"], 1),
        "peak_mb": round(memory["VmHWM"], 1),
        "cpu_percent_of_a_core": round(100 * cpu / seconds, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument(
        "--interval", type=float, default=15.0, help="of observations; decisions are four times as rare"
    )
    parser.add_argument("--policy", default="threshold")
    parser.add_argument("--mode", default="auto")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(parser.parse_args(), Path(folder))
    print(json.dumps(result, indent=1))
    return 0 if result["resident_mb"] <= 150 and result["cpu_percent_of_a_core"] <= 2 else 1  # pyright: ignore[reportOperatorIssue]


if __name__ == "__main__":
    sys.exit(main())
