"""The sidecar's log: lines for people, or JSON for machines."""

import json
import logging
import time
from typing import Any

from kvpilot.agent.control.nouns import Decision


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, message; a decision with its parts."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        decision = getattr(record, "decision", None)
        if isinstance(decision, Decision):
            line["decision"] = {name: value for name, value in decision.as_dict().items() if name != "window"}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(log_format: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if log_format == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    root = logging.getLogger()
    root.handlers, root.level = [handler], logging.INFO
    logging.getLogger("httpx").setLevel(logging.WARNING)
