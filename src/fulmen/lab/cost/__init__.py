"""What a compiled kernel costs on an A100 or H100, without one: a model of the card that runs its SASS in order.

    sass          the listing of a cubin: instructions, what ptxas tells the hardware about each, loops
    operations    an instruction as a multiprocessor sees it: pipe, latency, shared memory
    simulation    warps on one multiprocessor, clock by clock
    work          what a launch does, from Triton's own code: trips of its loops, bytes of its operands
    machines      the cards, with the constants that the model is calibrated by
    estimate      occupancy, waves, memory: from one multiprocessor to a launch

A model, not a measurement: docs/gpu_cost.md says how it was calibrated and what it misses.
"""
