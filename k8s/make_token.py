"""`python -m kvpilot.k8s.make_token FILE`: the admin token that engine and sidecar of a pod share."""

import sys
from pathlib import Path

from kvpilot.engine.errors import KVPilotError
from kvpilot.engine.server.token import resolve_token


def main(arguments: list[str]) -> int:
    """Creates the file unless it is there; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m kvpilot.k8s.make_token FILE", file=sys.stderr)
        return 2
    try:
        resolve_token(None, Path(arguments[0]), environment={})
    except KVPilotError as error:
        print(f"make_token: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
