"""What the Triton kernels need to know of GPUs: architectures, tiles, and how to run and inspect without one."""
