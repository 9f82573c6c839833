"""Triton kernels for NVIDIA GPUs (compute capability 8.9 and up). Import it only where triton is installed."""
