"""DQN for several players that act at once."""

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
        not DI-engine's list. Elements hold their discount, because without it DI-engine does not apply ``done`` (B,) to
        all players.
    """

    def _process_transition(self, obs: Any, policy_output: Any, timestep: Any) -> Dict[str, Any]:
        transition = super()._process_transition(obs, policy_output, timestep)
        transition['value_gamma'] = torch.tensor(self._gamma**self._nstep)
        return transition

    # Wrapped, so that ding_store still recognizes DQNPolicy's method, which takes one collated batch.
    @functools.wraps(DQNPolicy._forward_learn)
    def _forward_learn(self, data: Any) -> Dict[str, Any]:
        output = super()._forward_learn(data)
        output['priority'] = np.mean(output['priority'], axis=-1).tolist()
        return output


@POLICY_REGISTRY.register('gobigger_dqn_command')
class GoBiggerDQNCommandPolicy(GoBiggerDQNPolicy, EpsCommandModePolicy):
    """GoBiggerDQNPolicy for the config pipeline."""
