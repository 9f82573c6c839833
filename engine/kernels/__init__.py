"""CPU kernels. Native code where it was built and the CPU can run it, torch operations elsewhere.

`KVPILOT_KERNELS=torch` in the environment forces the torch operations.
"""

from kvpilot.engine.kernels.torch_ops import add_rms_norm, rms_norm, silu_mul

__all__ = ["add_rms_norm", "rms_norm", "silu_mul"]
