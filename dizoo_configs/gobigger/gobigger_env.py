"""GoBigger for DI-engine: one team of players, which a policy controls, against teams of the game's own bots."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from types import ModuleType
from typing import Any, Dict, Iterator, List

import gym
import numpy as np
from ding.envs import BaseEnv, BaseEnvTimestep
from ding.utils import ENV_REGISTRY
from easydict import EasyDict

from dizoo_configs.extras import need

Observation = Dict[str, Any]

DIRECTIONS = 8
ACTIONS = 2 * DIRECTIONS
SPLIT = 2  # the game's actions: 0 moves, 1 ejects a spore, 2 splits

#: Kind of ball -> maximum number in an observation, and features of each: position relative to the middle of the view,
#: radius, score. Some have a velocity. A clone also has a flag for the own team.
BALLS = {'food': (224, 4), 'thorns': (16, 6), 'spore': (32, 6), 'other': (32, 7)}
CLONES = (16, 6)
#: Features of the relation of an own clone to a ball: position, and how much larger the clone is.
RELATION = 3


@contextlib.contextmanager
def without_windows() -> Iterator[None]:
    """Make the game importable without tkinter. Its player of recordings imports that, and Debian's Python lacks it."""
    try:
        import tkinter.filedialog  # noqa: F401
    except ModuleNotFoundError:
        names = ('tkinter', 'tkinter.filedialog')
        before = {name: sys.modules[name] for name in names if name in sys.modules}
        sys.modules.update({name: ModuleType(name) for name in names})
        try:
            yield
        finally:
            for name in names:
                del sys.modules[name]
            sys.modules.update(before)
    else:
        yield


def num_scalars(num_teams: int) -> int:
    return 7 + num_teams


@ENV_REGISTRY.register('gobigger')
class GoBiggerEnv(BaseEnv):
    """
    Overview:
        A match of GoBigger. The policy's action is one of 16 for each of its P players: move in one of 8 directions, or
        split in it. The number of balls in view varies: they are sorted by distance and padded with zeros. ``count``
        has their number.
    Arguments:
        - cfg.team_num, cfg.player_num_per_team (:obj:`int`): Teams and players. The policy's team is the first.
        - cfg.match_frames, cfg.frame_skip (:obj:`int`): Frames of a match (20 make a second), and of an action.
        - cfg.reward_scale (:obj:`float`): Factor of the rewards. Without it, a step has about 0.01, which is small
          compared with the outputs of a new network.
        - cfg.reward_clip (:obj:`Optional[float]`): Bound of the rewards in both directions, as in Mnih et al. (2015):
          being eaten costs a hundred times what a step earns.
        - cfg.bot_level (:obj:`int`): 1: eats the nearest. 2: prefers thorns. 3: also flees and splits.
    Shapes:
        - obs: scalar ``(P, 7 + teams)``, clone ``(P, 16, 6)``, food ``(P, 224, 4)``, thorns ``(P, 16, 6)``, spore
          ``(P, 32, 6)``, other ``(P, 32, 7)``, relation of each of the last four ``(P, 16, N, 3)``, count of these and
          of clone ``(P,)``; all float32.
        - action (:obj:`np.ndarray`): ``(P,)``, int64.
        - reward (:obj:`np.ndarray`): ``(P, 1)``, growth of the logarithm of a player's score, scaled and cut;
          ``info['eval_episode_return']`` (1,) is that growth over the match, the mean over the players.
    Raises:
        - ModuleNotFoundError: At the first reset, if the extra is missing. The text has the command that installs it.
    """

    config = dict(
        team_num=4,
        player_num_per_team=3,
        match_frames=3600,
        frame_skip=10,
        bot_level=3,
        reward_scale=1.0,
        reward_clip=None,
    )

    def __init__(self, cfg: EasyDict) -> None:
        self._cfg = EasyDict({**self.config, **cfg})
        if self._cfg.bot_level not in (1, 2, 3):
            raise ValueError(f'env.bot_level ({self._cfg.bot_level!r}) must be 1, 2 or 3')
        for name in ('reward_scale', 'reward_clip'):
            value = self._cfg[name]
            if value is not None and not value > 0:
                raise ValueError(f'env.{name} ({value!r}) must be greater than 0')
        self._players = range(self._cfg.player_num_per_team)
        self._action_space = gym.spaces.MultiDiscrete([ACTIONS] * len(self._players))
        self._random = np.random.RandomState(0)
        self._dynamic = True
        self._seed = 0
        self._server: Any = None

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        """
        Seed the matches. With ``dynamic_seed`` every match differs, otherwise all are the same. Both are reproducible.
        """
        self._seed, self._dynamic = seed, dynamic_seed
        self._random = np.random.RandomState(seed)

    def reset(self) -> Observation:
        self._server = self._new_match()
        self._first = self._score = self._look()
        return self._observation()

    def step(self, action: np.ndarray) -> BaseEnvTimestep:
        orders = {player: bot.step(self._states[player]) for player, bot in self._bots.items()}
        orders.update({player: order(int(each)) for player, each in zip(self._players, np.asarray(action).ravel())})
        for frame in range(self._cfg.frame_skip):
            done = self._server.step(orders if frame == 0 else None)
            if done:
                break
        before, self._score = self._score, self._look()
        info = {}
        if done:
            info['eval_episode_return'] = np.array([(self._score - self._first).mean()], np.float32)
        reward = (self._cfg.reward_scale * (self._score - before)).astype(np.float32)[:, None]
        if self._cfg.reward_clip is not None:
            reward = reward.clip(-self._cfg.reward_clip, self._cfg.reward_clip)
        return BaseEnvTimestep(self._observation(), reward, bool(done), info)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None

    @property
    def observation_space(self) -> gym.spaces.Dict:
        players, clones = len(self._players), CLONES[0]
        shapes: Dict[str, Any] = {'scalar': (players, num_scalars(self._cfg.team_num)), 'clone': (players, *CLONES)}
        shapes.update({kind: (players, *size) for kind, size in BALLS.items()})
        shapes['relation'] = {kind: (players, clones, size[0], RELATION) for kind, size in BALLS.items()}
        shapes['count'] = {kind: (players,) for kind in (*BALLS, 'clone')}
        return _space(shapes)

    @property
    def action_space(self) -> gym.spaces.MultiDiscrete:
        return self._action_space

    def random_action(self) -> np.ndarray:
        return self._action_space.sample()

    @property
    def reward_space(self) -> gym.spaces.Box:
        return gym.spaces.Box(-np.inf, np.inf, (len(self._players), 1), np.float32)

    def _new_match(self) -> Any:
        os.environ.setdefault('SDL_VIDEODRIVER', 'dummy')
        with without_windows():
            Server = need('gobigger.server', 'gobigger').Server
            BotAgent = need('gobigger.agents', 'gobigger').BotAgent
        cfg = self._cfg
        seed = int(self._random.randint(2**31)) if self._dynamic else self._seed
        # A server's parts share the generator that they are made with, so another seed needs another server (12 ms).
        settings = dict(
            team_num=cfg.team_num, player_num_per_team=cfg.player_num_per_team, frame_limit=cfg.match_frames
        )
        server = Server(settings, seed=seed)
        # The game draws some directions, and its bots all random choices, from Python's own generator.
        random.seed(seed)
        server.reset()
        players = range(len(self._players), cfg.team_num * cfg.player_num_per_team)
        self._bots = {player: BotAgent(player, level=cfg.bot_level) for player in players}
        return server

    def _look(self) -> np.ndarray:
        """Read the game's state. Return the logarithms of the players' scores, shape (P,)."""
        self._world, self._states, _ = self._server.obs()
        return np.log([self._states[player]['score'] for player in self._players])

    def _observation(self) -> Observation:
        seen = [self._seen_by(player) for player in self._players]
        return _stack(seen)

    def _seen_by(self, player: int) -> Observation:
        state = self._states[player]
        left, top, right, bottom = state['rectangle']
        middle, reach = np.array([(left + right) / 2, (top + bottom) / 2]), (right - left) / 2
        balls = {kind: _array(state['overlap'][kind]) for kind in ('food', 'thorns', 'spore', 'clone')}
        clones = balls.pop('clone')
        is_own = clones[:, -2] == player
        is_ally = (clones[:, -1:] == state['team_name']).astype(np.float32)
        balls['other'] = np.concatenate([clones[:, :6], is_ally], axis=1)[~is_own]
        # Largest first. The other kinds are sorted by distance.
        own = clones[is_own][:, :6]
        own = own[np.argsort(-own[:, 2], kind='stable')][: CLONES[0]]
        obs: Observation = {
            'scalar': self._scalar(state, middle, reach),
            'clone': _padded(_features(own, middle, reach), *CLONES),
            'relation': {},
            'count': {'clone': np.float32(len(own))},
        }
        for kind, (most, width) in BALLS.items():
            nearest = balls[kind][:, :width]
            distance = np.abs(nearest[:, :2] - middle).sum(1)
            nearest = nearest[np.argsort(distance, kind='stable')][:most]
            obs[kind] = _padded(_features(nearest, middle, reach), most, width)
            obs['relation'][kind] = _relation(own, nearest, reach, most)
            obs['count'][kind] = np.float32(len(nearest))
        return obs

    def _scalar(self, state: Dict[str, Any], middle: np.ndarray, reach: float) -> np.ndarray:
        width, height = self._world['border']
        played = self._world['last_frame_count'] / self._cfg.match_frames
        own = [np.log(state['score']) / 10, state['can_eject'], state['can_split']]
        teams = [np.log(score) / 10 for score in self._world['leaderboard'].values()]
        return np.array([played, middle[0] / width, middle[1] / height, reach / width, *own, *teams], np.float32)

    def __repr__(self) -> str:
        return f'GoBiggerEnv({self._cfg.team_num} teams x {self._cfg.player_num_per_team} players)'


def order(action: int) -> List[float]:
    """Return the game's action: direction (x, y) and what to do."""
    angle = 2 * np.pi * (action % DIRECTIONS) / DIRECTIONS
    return [np.cos(angle), np.sin(angle), SPLIT if action >= DIRECTIONS else 0]


def _array(balls: List[Any]) -> np.ndarray:
    return np.array(balls, np.float32) if balls else np.zeros((0, 10), np.float32)


def _features(balls: np.ndarray, middle: np.ndarray, reach: float) -> np.ndarray:
    """Scale positions, radius, score and velocity (if any) for a network."""
    balls = balls.copy()
    balls[:, :2] = (balls[:, :2] - middle) / reach
    balls[:, 2] /= reach
    balls[:, 3] = np.log1p(balls[:, 3]) / 10
    balls[:, 4:6] /= 50
    return balls


def _relation(own: np.ndarray, balls: np.ndarray, reach: float, most: int) -> np.ndarray:
    """Return the relation of each own clone to each ball, shape (16, most, 3)."""
    relation = np.zeros((CLONES[0], most, RELATION), np.float32)
    part = relation[: len(own), : len(balls)]
    part[..., :2] = (balls[None, :, :2] - own[:, None, :2]) / reach
    part[..., 2] = (own[:, None, 2] - balls[None, :, 2]) / reach
    return relation


def _padded(balls: np.ndarray, most: int, width: int) -> np.ndarray:
    padded = np.zeros((most, width), np.float32)
    padded[: len(balls)] = balls[:, :width]
    return padded


def _stack(each: List[Any]) -> Any:
    if isinstance(each[0], dict):
        return {key: _stack([one[key] for one in each]) for key in each[0]}
    return np.stack(each)


def _space(shapes: Dict[str, Any]) -> gym.spaces.Dict:
    boxes = {
        key: _space(shape) if isinstance(shape, dict) else gym.spaces.Box(-np.inf, np.inf, shape, np.float32)
        for key, shape in shapes.items()
    }
    return gym.spaces.Dict(boxes)
