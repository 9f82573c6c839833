"""CPU kernels. Native code where it was built and the CPU can run it, torch operations elsewhere.

`KVPILOT_KERNELS=torch` in the environment forces the torch operations.
"""

from kvpilot.engine.kernels.page_table import PageTable, page_cells
from kvpilot.engine.kernels.torch_ops import (
    RopeTables,
    add_rms_norm,
    decode_attention,
    gather_pages,
    rms_norm,
    rope_rotate_write,
    silu_mul,
)

__all__ = [
    "PageTable",
    "RopeTables",
    "add_rms_norm",
    "decode_attention",
    "gather_pages",
    "page_cells",
    "rms_norm",
    "rope_rotate_write",
    "silu_mul",
]
