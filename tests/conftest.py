import torch

# Tests run in as many processes as there are cores; more threads each would only get in each other's way.
torch.set_num_threads(1)
