"""Rows of small data sets, for tests."""

import numpy as np
import torch
import treetensor.torch as ttorch

from ding_store.datasets import DataSetWriter


def element(number, episode=0, done=False, width=4):
    """An element whose observation is its number, as DI-engine's collectors make them."""
    obs = torch.full((width,), float(number))
    return ttorch.Tensor(
        {
            'obs': obs,
            'next_obs': obs + 1,
            'action': torch.tensor([number % 2]),
            'reward': torch.tensor([float(number)]),
            'done': torch.tensor(done),
            'env_data_id': torch.tensor([episode]),
        }
    )


def write(path, num_rows=70, rows_per_append=7, length=10, **options):
    """A data set whose row i has the number i. Each append has another policy version and its own commit."""
    with DataSetWriter(str(path), **{'commit_bytes': 1, **options}) as writer:
        for begin in range(0, num_rows, rows_per_append):
            numbers = range(begin, min(begin + rows_per_append, num_rows))
            elements = [element(i, i // length, i % length == length - 1) for i in numbers]
            writer.append_elements(elements, {'policy_version': begin // rows_per_append})


def numbers(batch):
    """The numbers of a batch's rows."""
    return np.asarray(batch['obs'])[:, 0].astype(int).tolist()
