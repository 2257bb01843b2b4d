"""`fulmen inspect`: the Triton kernels compiled for every architecture, without a GPU."""
