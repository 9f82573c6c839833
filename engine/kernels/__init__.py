"""CPU kernels. Native code where it was built and the CPU can run it, torch operations elsewhere.

`KVPILOT_KERNELS=torch` in the environment forces the torch operations.
"""

from kvpilot.engine.kernels import torch_ops
from kvpilot.engine.kernels.cpu import CPUKernels, library_name, load_library
from kvpilot.engine.kernels.page_table import PageTable, page_cells
from kvpilot.engine.kernels.torch_ops import RopeTables

_library = load_library()
_kernels = torch_ops if _library is None else CPUKernels(_library)

IMPLEMENTATION: str = "torch" if _library is None else library_name(_library)
"""Which code runs: "v4" or "v3" (x86-64 levels), "any" (another machine), or "torch"."""

add_rms_norm = _kernels.add_rms_norm
convert_page = _kernels.convert_page
decode_attention = _kernels.decode_attention
gather_pages = _kernels.gather_pages
prefill_attention = _kernels.prefill_attention
rms_norm = _kernels.rms_norm
rope_rotate_write = _kernels.rope_rotate_write
silu_mul = _kernels.silu_mul

__all__ = [
    "IMPLEMENTATION",
    "PageTable",
    "RopeTables",
    "add_rms_norm",
    "convert_page",
    "decode_attention",
    "gather_pages",
    "page_cells",
    "prefill_attention",
    "rms_norm",
    "rope_rotate_write",
    "silu_mul",
]
