"""Lies here so that pytest puts this folder on `sys.path`: tests of every part import `forkpool`."""

import torch

# Two cores and up to four ranks: a thread pool per rank would only make them wait for each other.
torch.set_num_threads(1)
