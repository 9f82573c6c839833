"""Jobs for worker processes, which import them from here."""

import os
import signal
import time
from pathlib import Path

from kvpilot.engine.errors import KnobInvalidError


def kill_me(item: str) -> str:
    """`die` kills its worker, a path does so the first time, `fail` raises, anything else is answered."""
    if item == "fail":
        raise KnobInvalidError("kv_level", 9, "an integer in [0, 2]")
    if item == "bug":
        raise ZeroDivisionError
    if item == "sleep":
        time.sleep(600)
    marker = Path(item)
    if item == "die" or (marker.is_absolute() and not marker.exists()):
        if item != "die":
            marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item
