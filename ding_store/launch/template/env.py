"""An environment of your own. It needs gymnasium only: neither DI-engine nor ding_store."""

import gymnasium
import numpy as np


class Reach(gymnasium.Env):
    """Move a point on a line to a target. Each step costs 0.05, and the target gives 1."""

    def __init__(self) -> None:
        # The policy needs a Box of float32 and, for DQN, a Discrete space of actions.
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)  # the point, the target
        self.action_space = gymnasium.spaces.Discrete(3)  # left, stay, right

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # seeds self.np_random, so draw from it
        self._point, self._target = self.np_random.uniform(-1.0, 1.0, 2)
        self._num_steps = 0
        return self._observe(), {}

    def step(self, action):
        self._point = float(np.clip(self._point + 0.2 * (int(action) - 1), -1.0, 1.0))
        self._num_steps += 1
        terminated = abs(self._point - self._target) <= 0.1
        truncated = self._num_steps >= 20
        return self._observe(), 1.0 if terminated else -0.05, terminated, truncated, {}

    def _observe(self):
        return np.array([self._point, self._target], np.float32)
