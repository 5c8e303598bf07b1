"""Small tensors: more threads than one only get in each other's way."""

import torch

if not torch.cuda.is_available():
    torch.set_num_threads(1)
