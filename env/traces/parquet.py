"""The same columns as Parquet: small, and quick to read. Needs pyarrow (the extra `env`)."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

from kvpilot.env.traces.blocks import offsets_of
from kvpilot.env.traces.source import Source
from kvpilot.env.traces.trace import ROW_COLUMNS, Trace, TraceError

VERSION = 1
METADATA = b"kvpilot_trace"


def _pyarrow() -> ModuleType:
    try:
        import_module("pyarrow.parquet")
    except ImportError:
        raise TraceError("Parquet needs pyarrow: pip install 'kvpilot[env]', or use .jsonl.gz") from None
    return import_module("pyarrow")


def write_parquet(trace: Trace, path: Path) -> None:
    pa = _pyarrow()
    columns = {name: pa.array(getattr(trace, name)) for name in ROW_COLUMNS}
    # large_list: offsets of 64 bits, a trace may have more than 2^31 blocks
    columns["blocks"] = pa.LargeListArray.from_arrays(trace.block_offsets, trace.block_ids)
    metadata = {
        "version": VERSION,
        "block_size": trace.block_size,
        "provenance": list(trace.provenance),
    }
    table = pa.table(columns).replace_schema_metadata({METADATA: json.dumps(metadata)})
    pa.parquet.write_table(table, path, compression="zstd")


def read_parquet(source: Source) -> Trace:
    """TraceError if it is damaged or was not written by `write_parquet`; there are no records to skip."""
    pa = _pyarrow()
    try:
        table = pa.parquet.read_table(source.path)
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{source.path}: not a readable Parquet file ({error})") from None
    metadata = json.loads((table.schema.metadata or {}).get(METADATA, b"{}"))
    missing = sorted({*ROW_COLUMNS, "blocks"} - set(table.column_names))
    if metadata.get("version") != VERSION or missing:
        raise TraceError(
            f"{source.path}: not a trace of version {VERSION}: expected the metadata {METADATA.decode()} and "
            f"the columns {', '.join(missing) or 'that it has'}"
        )
    blocks = table["blocks"].combine_chunks()
    columns = {name: table[name].to_numpy() for name in ROW_COLUMNS}
    try:
        return Trace(
            **columns,
            block_ids=blocks.flatten().to_numpy(zero_copy_only=False),
            block_offsets=offsets_of(blocks.value_lengths().to_numpy()),
            block_size=metadata["block_size"],
            provenance=(*metadata["provenance"], source.provenance("parquet", table.num_rows)),
        )
    except TraceError as error:
        raise TraceError(f"{source.path}: {error}") from None
