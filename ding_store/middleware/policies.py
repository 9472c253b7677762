"""The policies in a process's checkpoints. A file holds all of them, from the same moment."""

from __future__ import annotations

from typing import Any, Dict, List

from ditk import logging

from ding_store.checkpoint import EXTRA
from ding_store.checkpoint.snapshot import optimizers_of, schedules_of
from ding_store.errors import ConfigError
from ding_store.middleware.policy_state import left_out, set_left_out


class Policies:
    """
    Overview:
        The policies of one process, in the order in which the script adds them. A restarted script uses the same order.
        In a checkpoint the first policy's state is where DI-engine reads it. The others are under the key ``EXTRA``.
    """

    def __init__(self) -> None:
        self._policies: List[Any] = []
        self._path, self._is_resumed, self._is_complete = '', False, False
        self._parts: List[Dict[str, Any]] = []  # one per policy of a loaded checkpoint

    def load(self, path: str, state: Dict[str, Any], is_resumed: bool) -> None:
        """
        Overview:
            Set a checkpoint that the policies start from. ``add`` loads each policy's part.
        Arguments:
            - is_resumed (:obj:`bool`): True: the checkpoint must have the same policies. False: policies that it lacks
              start anew.
        """
        self._path, self._is_resumed = path, is_resumed
        extra = state.get(EXTRA, {})
        first = {name: extra[name] for name in ('policy', 'schedules') if name in extra}
        first['state'] = {key: value for key, value in state.items() if key != EXTRA}
        self._parts = [first, *extra.get('others', [])]

    def add(self, policy: Any) -> bool:
        """
        Overview:
            Add a policy, and load its part of the checkpoint. Return False if it was added before.
        Raises:
            - ConfigError: The checkpoint has another policy or none in its place, or training has begun.
        """
        if any(each is policy for each in self._policies):
            return False
        if self._is_complete:
            raise ConfigError(
                'a Checkpointer (or CkptSaver) of another policy was created after training began, when it can no '
                'longer resume. Create all of them before the first iteration.'
            )
        number = len(self._policies)
        self._policies.append(policy)
        if number < len(self._parts):
            self._load(policy, number)
        elif self._is_resumed:
            self._refuse()
        return True

    def check_complete(self) -> None:
        """
        Overview:
            Refuse further policies from now on, and free the loaded checkpoint.
        Raises:
            - ConfigError: The resumed checkpoint has more policies.
        """
        if self._is_resumed and len(self._policies) < len(self._parts):
            self._refuse()
        self._parts, self._is_resumed, self._is_complete = [], False, True

    def state(self) -> Dict[str, Any]:
        """Return the policies' states for a checkpoint."""
        first, *others = [_part(each) for each in self._policies]
        return {**first.pop('state'), EXTRA: {**first, 'others': others}}

    def _load(self, policy: Any, number: int) -> None:
        part, configured = self._parts[number], _settings(policy)
        try:
            policy.learn_mode.load_state_dict(part['state'])
            if 'policy' in part:  # DI-engine's files do not have it, nor do old ones of ding_store
                set_left_out(policy, part['policy'])
        except (KeyError, RuntimeError, ValueError) as e:
            which = f'policy {number + 1} of {len(self._parts)}' if len(self._parts) > 1 else 'the policy'
            raise ConfigError(
                f'{self._path} does not fit {which}: {e}. If the model was changed, set store.checkpoint.path to '
                'another directory, or remove this one, to start anew.'
            ) from e
        self._warn_of(configured, _settings(policy))
        schedules = part.get('schedules', {}) if self._is_resumed else {}
        for name, schedule in schedules_of(policy).items():
            if name in schedules:
                schedule.load_state_dict(schedules[name])

    def _warn_of(self, configured: List[Dict[str, Any]], loaded: List[Dict[str, Any]]) -> None:
        """
        Warn of optimizer settings that differ from the config. torch keeps them in the optimizer's state, so those in
        the checkpoint replace the configured ones.
        """
        pairs = [(name, old[name], new[name]) for old, new in zip(configured, loaded) for name in old if name in new]
        changed = dict.fromkeys(f'{name} is {new}, not {old}' for name, old, new in pairs if new != old)
        if changed:
            logging.warning(f'ding_store: {self._path} overrules settings of optimizers: {"; ".join(changed)}')

    def _refuse(self) -> None:
        raise ConfigError(
            f'{self._path} has {len(self._parts)} policies, but Checkpointer and CkptSaver have '
            f'{len(self._policies)} now. To start anew, set store.checkpoint.path to another directory or remove this '
            'one.'
        )


def _settings(policy: Any) -> List[Dict[str, Any]]:
    """Return the settings of a policy's optimizers, by group. A scheduled learning rate is left out."""
    own = {'params', 'lr'} if schedules_of(policy) else {'params'}
    groups = [group for each in optimizers_of(policy) for group in each.param_groups]
    return [{name: value for name, value in group.items() if name not in own} for group in groups]


def _part(policy: Any) -> Dict[str, Any]:
    state = policy.learn_mode.state_dict()
    schedules = {name: schedule.state_dict() for name, schedule in schedules_of(policy).items()}
    return dict(state=state, policy=left_out(policy, state), schedules=schedules)
