"""DQN of several players who act at once: what DI-engine's DQN lacks for it."""

from __future__ import annotations

import functools
from typing import Any, Dict

import numpy as np
import torch
from ding.policy import DQNPolicy
from ding.policy.command_mode_policy_instance import EpsCommandModePolicy
from ding.utils import POLICY_REGISTRY


@POLICY_REGISTRY.register('gobigger_dqn')
class GoBiggerDQNPolicy(DQNPolicy):
    """
    Overview:
        DQNPolicy for actions ``(B, P)`` and rewards ``(B, P, 1)``. An element's priority is the mean over its players,
        where DI-engine's would be a list; and elements say their discount, without which DI-engine does not
        see that ``done`` (B,) is all players'.
    """

    def _process_transition(self, obs: Any, policy_output: Any, timestep: Any) -> Dict[str, Any]:
        transition = super()._process_transition(obs, policy_output, timestep)
        transition['value_gamma'] = torch.tensor(self._gamma**self._nstep)
        return transition

    # Of its name and its making: ding_store sees that it takes one collated batch.
    @functools.wraps(DQNPolicy._forward_learn)
    def _forward_learn(self, data: Any) -> Dict[str, Any]:
        output = super()._forward_learn(data)
        output['priority'] = np.mean(output['priority'], axis=-1).tolist()
        return output


@POLICY_REGISTRY.register('gobigger_dqn_command')
class GoBiggerDQNCommandPolicy(GoBiggerDQNPolicy, EpsCommandModePolicy):
    """The same in the config pipeline."""
