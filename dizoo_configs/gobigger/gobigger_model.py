"""Q-network for GoBigger's structured observations."""

from __future__ import annotations

from typing import Any, Dict, Sequence

import torch
from ding.utils import MODEL_REGISTRY
from torch import Tensor, nn

from dizoo_configs.gobigger.gobigger_env import BALLS, CLONES, RELATION, num_scalars


@MODEL_REGISTRY.register('gobigger_dqn')
class GoBiggerDQN(nn.Module):
    """
    Overview:
        Q-network that all players share. It encodes each ball. A player's vector has the mean and the maximum over
        each kind's encodings, the nearest balls of each kind unencoded, and the player itself.
    Arguments:
        - team_num (:obj:`int`): Teams of the match.
        - action_shape (:obj:`int`): Number of actions of a player.
        - encoder_hidden_size_list (:obj:`Sequence[int]`): Widths of the layers from that vector to the Q-values.
        - ball_hidden_size (:obj:`int`): Width of a ball's encoding.
        - num_nearest (:obj:`int`): Number of balls of each kind that enter unencoded.
    Shapes:
        - obs: As in GoBiggerEnv, with a batch dimension in front.
        - logit (:obj:`torch.Tensor`): ``(B, P, action_shape)``.
    """

    def __init__(
        self,
        team_num: int = 4,
        action_shape: int = 16,
        encoder_hidden_size_list: Sequence[int] = (128, 64),
        ball_hidden_size: int = 32,
        num_nearest: int = 4,
    ) -> None:
        super().__init__()
        self._num_nearest = num_nearest
        widths = {kind: width for kind, (_, width) in BALLS.items()}
        widths['clone'] = CLONES[1] + RELATION * len(BALLS)
        self.encoders = nn.ModuleDict(
            {kind: nn.Sequential(nn.Linear(width, ball_hidden_size), nn.ReLU()) for kind, width in widths.items()}
        )
        size = num_scalars(team_num) + 2 * len(widths) * ball_hidden_size + num_nearest * sum(widths.values())
        layers = []
        for width in encoder_hidden_size_list:
            layers += [nn.Linear(size, width), nn.ReLU()]
            size = width
        self.head = nn.Sequential(*layers, nn.Linear(size, action_shape))

    def forward(self, obs: Dict[str, Any]) -> Dict[str, Tensor]:
        count = obs['count']
        # The surroundings of a clone: the mean of its relations to the balls of each kind.
        among = [obs['relation'][kind].sum(-2) / count[kind].clamp(min=1)[..., None, None] for kind in BALLS]
        balls = {kind: obs[kind] for kind in BALLS}
        balls['clone'] = torch.cat([obs['clone'], *among], dim=-1)
        parts = [obs['scalar']]
        for kind, each in balls.items():
            is_there = torch.arange(each.shape[-2], device=each.device) < count[kind][..., None]
            # ReLU keeps encodings at or above zero, so that absent balls, which become zero, change neither sum nor
            # maximum.
            encoded = self.encoders[kind](each) * is_there[..., None]
            parts += [encoded.sum(-2) / count[kind].clamp(min=1)[..., None], encoded.amax(-2)]
            parts.append(each[..., : self._num_nearest, :].flatten(-2))
        return {'logit': self.head(torch.cat(parts, dim=-1))}
