"""The policies that a process's checkpoints are of: a file has all of them, of one moment."""

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
        The policies of one process, in the order in which they came: a script that is started again keeps to it. In a
        checkpoint the first one's state is where DI-engine looks for it, and the others are under our key.
    """

    def __init__(self) -> None:
        self._policies: List[Any] = []
        self._path, self._is_resumed, self._is_complete = '', False, False
        self._parts: List[Dict[str, Any]] = []  # of a checkpoint, for those that come

    def load(self, path: str, state: Dict[str, Any], is_resumed: bool) -> None:
        """
        Overview:
            Let the policies begin with those of a checkpoint, each when it comes.
        Arguments:
            - is_resumed (:obj:`bool`): They are the same, and go on; else those that it does not have begin afresh.
        """
        self._path, self._is_resumed = path, is_resumed
        extra = state.get(EXTRA, {})
        first = {name: extra[name] for name in ('policy', 'schedules') if name in extra}
        first['state'] = {key: value for key, value in state.items() if key != EXTRA}
        self._parts = [first, *extra.get('others', [])]

    def add(self, policy: Any) -> bool:
        """
        Overview:
            Returns whether it is a new one.
        Raises:
            - ConfigError: The checkpoint has another one in its place, or none; or it comes too late to begin with it.
        """
        if any(each is policy for each in self._policies):
            return False
        if self._is_complete:
            raise ConfigError(
                'a Checkpointer (or CkptSaver) of another policy was made after the first iteration: what was resumed '
                'is in use by then; make all of them before the first iteration'
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
            All have come, and no other may; what was loaded is let go.
        Raises:
            - ConfigError: The checkpoint that is resumed has more.
        """
        if self._is_resumed and len(self._policies) < len(self._parts):
            self._refuse()
        self._parts, self._is_resumed, self._is_complete = [], False, True

    def state(self) -> Dict[str, Any]:
        """What a checkpoint holds of them."""
        first, *others = [_part(each) for each in self._policies]
        return {**first.pop('state'), EXTRA: {**first, 'others': others}}

    def _load(self, policy: Any, number: int) -> None:
        part, configured = self._parts[number], _settings(policy)
        try:
            policy.learn_mode.load_state_dict(part['state'])
            if 'policy' in part:  # not in stock files, nor in ours of old
                set_left_out(policy, part['policy'])
        except (KeyError, RuntimeError, ValueError) as e:
            which = f'policy {number + 1} of {len(self._parts)}' if len(self._parts) > 1 else 'the policy'
            raise ConfigError(
                f'{self._path} does not fit {which}: {e}; was the model changed? To begin afresh, name '
                'another directory (store.checkpoint.path) or remove this one'
            ) from e
        self._warn_of(configured, _settings(policy))
        schedules = part.get('schedules', {}) if self._is_resumed else {}
        for name, schedule in schedules_of(policy).items():
            if name in schedules:
                schedule.load_state_dict(schedules[name])

    def _warn_of(self, configured: List[Dict[str, Any]], loaded: List[Dict[str, Any]]) -> None:
        """torch's optimizers have their settings in their state: what is configured now would be taken for used."""
        pairs = [(name, old[name], new[name]) for old, new in zip(configured, loaded) for name in old if name in new]
        changed = dict.fromkeys(f'{name} is {new}, not {old}' for name, old, new in pairs if new != old)
        if changed:
            logging.warning(f'ding_store: {self._path} overrules settings of optimizers: {"; ".join(changed)}')

    def _refuse(self) -> None:
        raise ConfigError(
            f'{self._path} has {len(self._parts)} policies, and there are {len(self._policies)} now (those of '
            'Checkpointer and CkptSaver): to begin afresh, name another directory (store.checkpoint.path) or remove '
            'this one'
        )


def _settings(policy: Any) -> List[Dict[str, Any]]:
    """Of its optimizers, group by group; a learning rate is none where it follows a schedule."""
    own = {'params', 'lr'} if schedules_of(policy) else {'params'}
    groups = [group for each in optimizers_of(policy) for group in each.param_groups]
    return [{name: value for name, value in group.items() if name not in own} for group in groups]


def _part(policy: Any) -> Dict[str, Any]:
    state = policy.learn_mode.state_dict()
    schedules = {name: schedule.state_dict() for name, schedule in schedules_of(policy).items()}
    return dict(state=state, policy=left_out(policy, state), schedules=schedules)
