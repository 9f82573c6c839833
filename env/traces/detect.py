"""Which format a file has, from its content."""

import tarfile

from kvpilot.env.traces.source import DAMAGED, BadRecord, Source, parse_object, shorten
from kvpilot.env.traces.trace import TraceError

FORMATS = {
    "mooncake": "Mooncake JSON lines",
    "agentic": "an archive of agentic sessions",
    "azure": "an Azure LLM inference CSV",
    "jsonl": "kvpilot JSON lines",
    "parquet": "kvpilot Parquet",
    "servegen-rates": "ServeGen arrival rates",
    "servegen-lengths": "ServeGen length distributions",
}
AZURE_HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"


def detect(source: Source) -> str:
    """A key of FORMATS; TraceError says what the file starts with if it is none of them."""
    try:
        with source.open() as stream:
            head = stream.read(512)
            if head.startswith(b"PAR1"):
                return "parquet"
            if head[257:262] == b"ustar":
                return _detect_archive(source)
            line = head + stream.readline() if b"\n" not in head else head
    except (*DAMAGED, tarfile.TarError) as error:
        raise TraceError(
            f"{source.path}: line 1: the compressed data is truncated or damaged ({error})"
        ) from None
    line = line.lstrip(b"\xef\xbb\xbf").split(b"\n")[0].strip()
    found = _detect_line(line) or (_detect_object(source) if line.startswith(b"{") else None)
    if found is None:
        start = shorten(line.decode("utf-8", "replace"))
        raise TraceError(
            f"{source.path}: line 1: cannot tell the format of {start}: expected {', '.join(FORMATS)}; "
            "name it with --format"
        )
    return found


def _detect_object(source: Source) -> str | None:
    """Of one long object, or of lines whose first is long."""
    with source.open() as stream:
        try:
            first = stream.readline()
            return _detect_line(first) or _detect_line(first + stream.read())
        except DAMAGED:
            return None


def _detect_line(line: bytes) -> str | None:
    if line.replace(b" ", b"") == AZURE_HEADER:
        return "azure"
    if len(line.split(b",")) == 6 and line[:1].isdigit():
        return "servegen-rates"
    try:
        record = parse_object(line)
    except BadRecord:
        return None
    keys = record.keys()
    if keys >= {"timestamp", "input_length"}:
        return "mooncake"
    if keys >= {"requests", "block_size"}:
        return "agentic"
    if "kvpilot_trace" in keys or keys >= {"arrival", "prompt_tokens"}:
        return "jsonl"
    if keys and all(isinstance(value, dict) and "input_tokens" in value for value in record.values()):
        return "servegen-lengths"
    return None


def _detect_archive(source: Source) -> str:
    with source.open() as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.name.endswith("-trace.csv"):
                return "servegen-rates"
            if member.name.endswith("-dataset.json"):
                return "servegen-lengths"
            if member.name.endswith(".json"):
                return "agentic"
    raise TraceError(f"{source.path}: the archive holds neither .json nor -trace.csv files")
