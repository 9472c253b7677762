"""Fixes for SMAC in DI-engine 0.5.3: a MASAC model that its policy can call, and QMIX in the task pipeline."""

from __future__ import annotations

import functools
from typing import Any, Dict, List

import torch
from ding.model import DiscreteMAQAC
from ding.policy import QMIXPolicy
from ding.torch_utils import to_device
from ding.utils import MODEL_REGISTRY
from ding.utils.data import timestep_collate

State = Dict[str, torch.Tensor]


@MODEL_REGISTRY.register('smac_maqac')
class SMACMAQAC(DiscreteMAQAC):
    """
    Overview:
        DiscreteMAQAC that takes the bare observation. DI-engine's reads ``inputs['obs']``, which DiscreteSACPolicy does
        not pass. Plain DI-engine's MASAC fails at its first forward (``KeyError: 'obs'``).
    """

    def forward(self, inputs: Dict[str, Any], mode: str) -> Dict[str, Any]:
        return super().forward(inputs if 'obs' in inputs else {'obs': inputs}, mode)


class TaskQMIXPolicy(QMIXPolicy):
    """
    Overview:
        QMIXPolicy whose transitions are trees of tensors, as the task pipeline's collectors require. DI-engine's hold
        the recurrent state as a list with one entry per agent, None in an episode's first step, which treetensor cannot
        hold. Here it is ``{'h': (A, 1, 1, H), 'c': (A, 1, 1, H)}``, zero in the first step, as the network reads None.
    """

    def _process_transition(self, obs: Any, policy_output: Dict[str, Any], timestep: Any) -> Dict[str, Any]:
        transition = super()._process_transition(obs, policy_output, timestep)
        agents = transition['prev_state']
        if agents[0] is None:
            hidden = self._cfg.model.hidden_size_list[-1]
            agents = [{key: torch.zeros(1, 1, hidden) for key in 'hc'}] * len(agents)
        transition['prev_state'] = {key: torch.stack([agent[key] for agent in agents]) for key in agents[0]}
        return transition

    # Wrapped, so that ding_store still recognizes QMIXPolicy's method, which takes one time-major batch.
    @functools.wraps(QMIXPolicy._data_preprocess_learn)
    def _data_preprocess_learn(self, data: List[Any]) -> Dict[str, Any]:
        batch = timestep_collate(data)
        # Only the states of the first two steps are used.
        batch['prev_state'] = [[_per_agent(state) for state in step] for step in batch['prev_state'][:2]]
        if self._cuda:
            batch = to_device(batch, self._device)
        batch['weight'] = batch.get('weight', None)
        batch['done'] = batch['done'].float()
        return batch


def _per_agent(state: State) -> List[State]:
    return [{key: leaf[agent] for key, leaf in state.items()} for agent in range(len(state['h']))]
