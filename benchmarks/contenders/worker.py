"""One contender in its own process: reads one JSON job per line, answers with one JSON result per line.

    python worker.py NAME --model FILE.gguf --threads 2

`NAME` is a module in this folder with a class `Contender(model_path, threads)` and a method
`run(prompts, num_output_tokens) -> Timing`. Modules of peers import nothing of kvpilot, so that any interpreter
can run them.
"""

import argparse
import importlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One repetition. Decoding begins when every request has its first token."""

    total_seconds: float  # first prompt handed over -> last token
    decode_seconds: float
    decode_tokens: int  # output tokens made during `decode_seconds`


class Contender(Protocol):
    version: str

    def run(self, prompts: list[list[int]], num_output_tokens: int) -> Timing: ...


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries may print; the protocol's stream is ours
    contender: Contender = importlib.import_module(args.name).Contender(args.model, args.threads)
    print(json.dumps({"ready": True, "version": contender.version}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        timing = contender.run(job["prompts"], job["num_output_tokens"])
        print(json.dumps(asdict(timing)), file=answers, flush=True)


if __name__ == "__main__":
    main()
