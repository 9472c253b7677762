"""One policy of DI-engine that several processes train: their optimizers exchange gradients or parameters."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch

from ding_store.checkpoint.snapshot import optimizers_of
from ding_store.errors import ConfigError
from ding_store.learners import ParameterServer, StoreOptimizer
from ding_store.learners.wire import check_mode
from ding_store.middleware.policy_state import targets_of
from ding_store.storage.store import Store


class SharedPolicy:
    """
    Overview:
        A policy in a worker, as ``share_policy`` returns it. ``close`` leaves: the policy continues alone.
    Attributes:
        - optimizers (:obj:`Dict[str, StoreOptimizer]`): By attribute of the policy.
    """

    def __init__(self, policy: Any, optimizers: Dict[str, StoreOptimizer]) -> None:
        self.optimizers = optimizers
        self._policy = policy

    def close(self) -> None:
        """Leave, and give the policy its own optimizers back."""
        for name, each in self.optimizers.items():
            each.close()
            setattr(self._policy, name, each.optimizer)

    def __enter__(self) -> SharedPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ServedPolicy:
    """
    Overview:
        The parameter servers of a policy, one per optimizer, each in a thread of this process. ``close`` ends them.
    Attributes:
        - servers (:obj:`Dict[str, ParameterServer]`): By attribute of the policy.
    """

    def __init__(self, servers: Dict[str, ParameterServer]) -> None:
        self.servers = servers
        for each in servers.values():
            each.start()

    @property
    def version(self) -> int:
        """The largest number of updates of an optimizer."""
        return max(each.version for each in self.servers.values())

    def close(self) -> None:
        for each in self.servers.values():
            each.close()

    def __enter__(self) -> ServedPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def share_policy(policy: Any, store: Store, name: str, sync: str = 'gradients', **options: Any) -> SharedPolicy:
    """
    Overview:
        Train a policy together with other processes. Each collects and trains as before. Only the steps of the
        policy's optimizers change: see ``StoreOptimizer``. With 'async' and an on-policy policy this is A3C, with
        'gradients' it is A2C, with 'async' and DQN it is GORILA. The policy begins with the parameters of the others,
        and its target networks with a copy of them.
    Arguments:
        - policy (:obj:`Policy`): A policy of DI-engine with the field 'learn', before its first update.
        - name (:obj:`str`): Name of the policy in the run.
        - sync (:obj:`str`): The mode. The first four need ``serve_policy`` in another process.
        - options: Further arguments of ``StoreOptimizer``.
    Raises:
        - ConfigError: A setting is wrong, or an optimizer is not an attribute of the policy.
        - StoreTimeout: No process serves this policy.
    """
    check_mode(sync)
    made: Dict[str, StoreOptimizer] = {}
    try:
        for attribute, each in optimizers_by_attribute(policy).items():
            made[attribute] = StoreOptimizer(each, store, f'{name}/{attribute}', sync=sync, **options)
    except BaseException:
        for each in made.values():
            each.close()
        raise
    for attribute, optimizer in made.items():
        setattr(policy, attribute, optimizer)
    for _, target in targets_of(policy):
        target.update(policy._learn_model.state_dict(), direct=True)
    return SharedPolicy(policy, made)


def serve_policy(
    policy: Any, store: Store, name: str, sync: str = 'gradients', path: Optional[str] = None, **options: Any
) -> ServedPolicy:
    """
    Overview:
        Serve a policy to workers that called ``share_policy``, in threads of this process. The policy has the newest
        parameters, but this process must not train it. Its target networks stay as they are.
    Arguments:
        - policy (:obj:`Policy`): Built from the same config as the workers' policies.
        - path (:obj:`Optional[str]`): Directory of checkpoints, with one directory per optimizer in it.
        - options: Further arguments of ``ParameterServer``.
    Raises:
        - ConfigError: See ``ParameterServer``.
    """
    servers: Dict[str, ParameterServer] = {}
    for attribute, optimizer in optimizers_by_attribute(policy).items():
        own = None if path is None else f'{path}/{attribute}'
        stepped = optimizer if sync not in ('average', 'elastic') else None
        parameters: List[torch.Tensor] = [each for group in optimizer.param_groups for each in group['params']]
        servers[attribute] = ParameterServer(
            parameters, stepped, store, f'{name}/{attribute}', sync=sync, path=own, **options
        )
    return ServedPolicy(servers)


def optimizers_by_attribute(policy: Any) -> Dict[str, torch.optim.Optimizer]:
    """Return a policy's optimizers by attribute."""
    found = {name: each for name, each in vars(policy).items() if isinstance(each, torch.optim.Optimizer)}
    several = {id(each) for each in optimizers_of(policy)}
    if not found or several != {id(each) for each in found.values()}:
        raise ConfigError(
            f'{type(policy).__name__} has {len(several)} optimizers, of which {len(found)} are attributes. Only '
            'those can be shared. Create the policy with the field "learn", and share it with StoreOptimizer yourself.'
        )
    return found
