"""Output tokens per second of this engine, its peers and the ceiling, side by side in one run.

    python -P benchmarks/cpu_throughput.py --peer-python /path/to/venv/bin/python

Every contender has its own process; only one works at a time, in turn, so that a change of the machine's load hits
all. Each repetition has new prompts (random token ids, the same for all contenders), and end tokens are ignored.
Peers need the extra `bench`; another interpreter keeps their versions apart from ours. A contender that cannot run
is named in the table with the reason.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from kvpilot.engine.model.fetch import resolve_model

CONTENDERS = Path(__file__).parent / "contenders"
OURS = ("kvpilot_engine", "gemm_ceiling")
PEERS = ("transformers_bf16", "transformers_packed", "transformers_fp32", "llama_cpp_batch")
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 40_000  # ordinary text


class ContenderError(Exception):
    """The contender's process ended; the message is the last line it wrote."""


class Worker:
    """A contender's process, idle between jobs."""

    def __init__(self, name: str, python: str, model_path: Path, threads: int) -> None:
        self.name = name
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        command = [python, str(CONTENDERS / "worker.py"), name, "--model", str(model_path)]
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=tempfile.gettempdir(),
        )
        try:
            self.version = self._read()["version"]
        except ContenderError:
            self.close()
            raise

    def run(self, prompts: list[list[int]], num_output_tokens: int) -> dict:
        assert self._process.stdin is not None
        job = {"prompts": prompts, "num_output_tokens": num_output_tokens}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise ContenderError((self._log.read().strip().splitlines() or ["no message"])[-1])
        return json.loads(line)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


@dataclass(frozen=True, kw_only=True)
class Result:
    """Medians over the repetitions, in output tokens per second."""

    contender: str
    concurrency: int
    decode_tokens_per_second: float  # once every request has its first token
    total_tokens_per_second: float  # prompts included
    decode_range: tuple[float, float]  # slowest, fastest repetition
    num_repetitions: int


def measure(workers: list[Worker], concurrencies: list[int], args: argparse.Namespace) -> list[Result]:
    """Repetitions in turn: every contender once, then all again. The first round is not counted."""
    rng = random.Random(args.seed)
    decode: dict[tuple[str, int], list[float]] = defaultdict(list)
    total: dict[tuple[str, int], list[float]] = defaultdict(list)
    for concurrency in concurrencies:
        for repetition in range(args.repetitions + 1):
            prompts = [
                [rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(args.prompt_tokens)]
                for _ in range(concurrency)
            ]
            for worker in workers:
                timing = worker.run(prompts, args.output_tokens if repetition else args.warmup_tokens)
                if repetition == 0:
                    continue
                key = worker.name, concurrency
                decode[key].append(timing["decode_tokens"] / timing["decode_seconds"])
                total[key].append(concurrency * args.output_tokens / timing["total_seconds"])
                print(f"{worker.name:20} {concurrency:3} {decode[key][-1]:8.1f}/s", file=sys.stderr)
    return [
        Result(
            contender=name,
            concurrency=concurrency,
            decode_tokens_per_second=round(statistics.median(rates), 1),
            total_tokens_per_second=round(statistics.median(total[name, concurrency]), 1),
            decode_range=(round(min(rates), 1), round(max(rates), 1)),
            num_repetitions=len(rates),
        )
        for (name, concurrency), rates in decode.items()
    ]


def start(args: argparse.Namespace, model_path: Path) -> tuple[list[Worker], dict[str, str]]:
    """The contenders that run, and why the others do not."""
    workers, missing = [], {}
    for name in args.contenders:
        python = args.peer_python if name in PEERS else sys.executable
        try:
            workers.append(Worker(name, python, model_path, args.threads))
        except (ContenderError, OSError) as error:
            missing[name] = str(error)
    return workers, missing


def print_table(results: list[Result], missing: dict[str, str], concurrencies: list[int]) -> None:
    print("output tokens/s, median: decoding alone (whole requests)")
    print(f"{'':20}" + "".join(f"{f'{c} at once':>20}" for c in concurrencies))
    cells = {(r.contender, r.concurrency): r for r in results}
    for name in dict.fromkeys(r.contender for r in results):
        row = (cells[name, c] for c in concurrencies)
        texts = [f"{r.decode_tokens_per_second:.0f} ({r.total_tokens_per_second:.0f})" for r in row]
        print(f"{name:20}" + "".join(f"{text:>20}" for text in texts))
    for name, reason in missing.items():
        print(f"{name:20} did not run: {reason}")


def machine() -> dict[str, str | int | None]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].partition(":")[2].strip() if names else platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count(), "load_average": f"{os.getloadavg()[0]:.2f}"}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="`smollm2` or a GGUF file")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="interpreter that has the extra `bench`"
    )
    parser.add_argument("--contenders", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16], help="at most 16")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--warmup-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here too")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    before = machine()
    workers, missing = start(args, resolve_model(args.model))
    try:
        results = measure(workers, args.concurrency, args)
        versions = {worker.name: worker.version for worker in workers}
    finally:
        for worker in workers:
            worker.close()
    print_table(results, missing, args.concurrency)
    if args.json:
        report = {
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "machine": before,
            "versions": versions,
            "missing": missing,
            "results": [asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
