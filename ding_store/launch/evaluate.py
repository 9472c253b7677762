"""``ding-store eval``: plays episodes with a saved policy, in the evaluator of the user's own script."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any, Dict, List, Optional

import numpy as np

from ding_store.checkpoint import CheckpointDir, read_state
from ding_store.environment import Environment, write_environment
from ding_store.errors import ConfigError
from ding_store.launch.log_lines import log_as
from ding_store.launch.printing import print_to
from ding_store.launch.user_script import UserScript, quiet_imports


def evaluate(checkpoint: str, episodes: Optional[int], script: UserScript, environment: Environment) -> int:
    """
    Overview:
        Run the script on plain DI-engine, in this process alone. When it makes its evaluator, load the policy, play
        the episodes, print their returns, and end. Nothing is trained or saved.
    Arguments:
        - checkpoint (:obj:`str`): A file, or a directory of checkpoints, whose newest one is loaded.
        - episodes (:obj:`Optional[int]`): Number of episodes. None: that of the script's config.
        - environment (:obj:`Environment`): The variables of this process.
    Returns:
        - code (:obj:`int`): 0 if the episodes were played, else the script's exit code, or 1.
    Raises:
        - ConfigError: There is no checkpoint, it does not fit the policy, or the script makes no evaluator.
        - CorruptPayload: The checkpoint cannot be read.
    """
    path = path_of(checkpoint)
    state = read_state(path)
    print_to(sys.stdout, f'playing the policy of {path}\n')
    # Without the store, the script makes DI-engine's parts, and takes no part in a run.
    write_environment(replace(environment, settings="{'enable': False}", checkpoint=None))
    log_as('eval')
    played = _Played(path, state, episodes)
    with quiet_imports():
        played.install()
    code = script.run()
    if played.error is not None:
        raise played.error
    if played.returns is None and code == 0:
        raise ConfigError(
            f"{script.target} ended before it made DI-engine's interaction_evaluator. eval plays scripts that have it"
        )
    return code


def path_of(checkpoint: str) -> str:
    """Return the file to load: the given one, or the newest in a directory."""
    if os.path.isfile(checkpoint):
        return checkpoint
    paths = CheckpointDir(checkpoint).paths() if os.path.isdir(checkpoint) else []
    if not paths:
        what = 'has no checkpoint' if os.path.isdir(checkpoint) else 'does not exist'
        raise ConfigError(
            f'{checkpoint!r} {what}. Name a directory that ding-store run --checkpoint wrote, such as '
            'checkpoints/<run>, or a file such as <exp_name>/ckpt/eval.pth.tar'
        )
    return paths[-1]


class _Played:
    """
    Overview:
        Replaces DI-engine's evaluator in this process by one that plays and then ends the script.
    Arguments:
        - path (:obj:`str`): The checkpoint, for messages.
        - state (:obj:`dict`): Its contents.
    """

    def __init__(self, path: str, state: Dict[str, Any], episodes: Optional[int]) -> None:
        self._path, self._state, self._episodes = path, state, episodes
        self.returns: Optional[List[float]] = None
        self.error: Optional[ConfigError] = None

    def install(self) -> None:
        """Replace the functions before the script imports them."""
        import ding.config
        import ding.config.config
        import ding.framework.middleware
        import ding.framework.middleware.functional
        import ding.framework.middleware.functional.evaluator as evaluator

        compile_config, make = ding.config.compile_config, evaluator.interaction_evaluator

        def compile_unsaved(*arguments: Any, **options: Any) -> Any:
            cfg = compile_config(*arguments, **{**options, 'save_cfg': False})
            self._set_episodes(cfg)
            return cfg

        def play(cfg: Any, policy: Any, env: Any, *arguments: Any, **options: Any) -> Any:
            self._set_episodes(cfg)
            self._play(make, evaluator, cfg, policy, env, arguments, options)
            raise SystemExit(0 if self.error is None else 1)

        for module in (ding.config, ding.config.config):
            module.compile_config = compile_unsaved
        for module in (evaluator, ding.framework.middleware.functional, ding.framework.middleware):
            module.interaction_evaluator = play

    def _set_episodes(self, cfg: Any) -> None:
        if self._episodes is not None:
            cfg.env.n_evaluator_episode = self._episodes
            # DI-engine needs an episode for each environment.
            cfg.env.evaluator_env_num = min(cfg.env.evaluator_env_num, self._episodes)

    def _play(self, make: Any, module: Any, cfg: Any, policy: Any, env: Any, arguments: Any, options: Any) -> None:
        from ding.framework import OnlineRLContext

        try:
            policy.load_state_dict(self._state)
        except (KeyError, RuntimeError, ValueError) as error:
            self.error = ConfigError(
                f"{self._path} does not fit the script's policy: {error}. Name a checkpoint of this script, and give "
                'it the options of its run'
            )
            return
        module.VectorEvalMonitor = _monitor(module.VectorEvalMonitor)
        evaluates = make(cfg, policy, env, *arguments, **options)
        context = OnlineRLContext()
        returns: List[float] = []
        self.returns = returns
        module.VectorEvalMonitor.returns = returns
        evaluates(context)
        env.close()
        print_to(
            sys.stdout,
            f'{len(returns)} episode{"" if len(returns) == 1 else "s"}: mean return {np.mean(returns):.3f}, standard '
            f'deviation {np.std(returns):.3f}\n',
        )


def _monitor(kind: Any) -> Any:
    """Return DI-engine's monitor of episodes, which also prints each return."""

    class PrintingMonitor(kind):
        returns: List[float] = []

        def update_reward(self, env_id: Any, reward: Any) -> None:
            found = self._reward[int(env_id)]
            if len(found) == found.maxlen:  # an environment that goes on after its last episode
                return
            super().update_reward(env_id, reward)
            self.returns.append(float(found[-1]))
            print_to(sys.stdout, f'episode {len(self.returns)}: return {self.returns[-1]:.3f}\n')

    return PrintingMonitor
