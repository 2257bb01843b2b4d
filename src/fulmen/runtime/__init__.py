"""What every operator stands on: the torch.library side, the CPU core, backends, checks."""
