"""A process that stands for a Lease. Writes one JSON line for each time that it knows itself leading.

usage: KUBECONFIG=FILE lease_candidate.py NAMESPACE LEASE IDENTITY DURATION_SECONDS OUTPUT
Times are on the clock that all processes of a machine share, taken before the question whether it leads.
"""

import json
import sys
import time
from pathlib import Path

from kvpilot.k8s.cluster import Cluster, connect
from kvpilot.k8s.lease import LeaseElector


def main(namespace: str, lease: str, identity: str, duration: str, output: str) -> None:
    elector = LeaseElector(Cluster(connect(), namespace), lease, identity, duration_seconds=int(duration))
    with Path(output).open("a", buffering=1) as file:
        while True:
            led = elector.campaign()
            begin = time.monotonic()
            if led:
                seen = begin
                while elector.is_leader and seen < begin + 0.1:
                    seen = time.monotonic()
                    file.write(
                        json.dumps({"identity": identity, "time": seen, "leads": elector.is_leader}) + "\n"
                    )
                    time.sleep(0.01)
            time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
