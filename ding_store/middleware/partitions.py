"""Partitions: the streams of experience that learners share among them, and how a collector distributes its rows."""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import treetensor.torch as ttorch

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError
from ding_store.middleware.backpressure import PROGRESS
from ding_store.middleware.consumer_offset import ENV_ID

#: Number of unfinished episodes whose partitions a collector remembers, the ones seen last.
_MAX_EPISODES = 4096
#: Header field of a part that has pieces of episodes, because their steps were split between partitions: the number of
#: rows of each piece, and the number of its first step in the episode.
PIECES = 'pieces'
#: Suffix of the directory in which ``ding-store reshard`` works, beside the replay.
RESHARD = '.reshard'
#: File in it that says that all new tables are there. It has the plan.
READY = 'ready'


def progress_name_of(partition: int, num: int) -> str:
    """Return the name of the value with a learner's progress in its partition."""
    return PROGRESS if num == 1 else f'{PROGRESS}/{partition}'


def own_partitions(rank: int, num_learners: int, num: int) -> range:
    """
    Return the partitions that a learner reads: neighbours, so that its part of a chunk is the same, however many
    partitions there are.
    """
    each = num // num_learners
    return range(rank * each, (rank + 1) * each)


class Layout(NamedTuple):
    """The numbers of learners and partitions of a run."""

    learners: int
    partitions: int

    def __str__(self) -> str:
        text = f'{self.learners} learner{"s" * (self.learners > 1)}'
        return text if self.partitions == self.learners else f'{text} with {self.partitions} partitions'

    def options(self) -> str:
        """Return the options of ``ding-store reshard`` that distribute a run like this."""
        more = '' if self.partitions == self.learners else f' --partitions {self.partitions}'
        return f'--learners {self.learners}{more}'


def layout_of(config: StoreConfig) -> Layout:
    """Return the layout that the settings of a process ask for."""
    asked = None if config.learners is None else config.learners.partitions
    return Layout(config.num_learners, asked or config.num_learners)


def layouts_of_plan(plan: Mapping[str, Any]) -> Tuple[Layout, Layout]:
    """Return the old and the new layout in the plan of ``ding-store reshard``, the content of its file ``ready``."""
    learners = plan['found'], plan['num']
    old, new = map(Layout, learners, plan.get('partitions', learners))
    return old, new


def check_replay_path(path: str, config: StoreConfig) -> None:
    """
    Overview:
        Check that the replay on the disk is of as many learners as this run has.
    Arguments:
        - path (:obj:`str`): ``RunSession.replay_path``, which has the number of learners in its name.
    Raises:
        - ConfigError: It is of another number.
    """
    root = path if config.num_learners == 1 else os.path.dirname(path)
    anew = f'ding-store reshard {os.path.dirname(root)} --run {config.run}'
    if os.path.exists(f'{root}{RESHARD}/{READY}'):
        with open(f'{root}{RESHARD}/{READY}') as file:
            _, planned = layouts_of_plan(json.load(file))
        raise ConfigError(
            f'the replay in {root!r} is being distributed anew, by a command that was interrupted. Run it again: '
            f'{anew} {planned.options()}'
        )
    found = num_learners_in(root)
    if found not in (None, config.num_learners):
        raise ConfigError(
            f'the replay in {root!r} is of {found} learner{"s" * (found != 1)}, and this run has '
            f'{config.num_learners}. Use --roles learner={found}, name another directory with --checkpoint, or '
            f'distribute it anew: {anew} {layout_of(config).options()}'
        )


def num_learners_in(root: str) -> Optional[int]:
    """Return of how many learners the replay in a directory is. None: there is none."""
    names = os.listdir(root) if os.path.isdir(root) else []
    found = [re.fullmatch(r'rank-\d+-of-(\d+)', name) for name in names]
    if any(match is None for match in found):
        return 1
    return max((int(match[1]) for match in found if match is not None), default=None)


class Part(NamedTuple):
    """A partition's part of a chunk."""

    elements: List[Any]
    header: Dict[str, Any]


class Partitioner:
    """
    Overview:
        Distributes the rows of one collector's chunks over partitions. Neighbouring rows stay together:
        - Episodes as elements go to the partition that has the fewest rows so far.
        - Steps for a replay: all steps of an episode go to one partition, also those of later chunks.
        - Other rows, such as sequences, and steps for a learner without a replay: each partition gets a run of rows,
          and all runs are equally long, or differ by one row. A run that ends within a trajectory becomes its end.
          The header numbers the pieces of episodes, so that a recorder can join them.
    Arguments:
        - num (:obj:`int`): Number of partitions.
        - keeps_episodes (:obj:`bool`): The steps are for a replay.
        - first (:obj:`int`): Number of the partition that gets the first of several equal choices.
    """

    def __init__(self, num: int, keeps_episodes: bool, first: int = 0) -> None:
        self._num, self._keeps_episodes, self._first = num, keeps_episodes, first
        self._num_rows = [0] * num
        self._partitions: OrderedDict[int, int] = OrderedDict()  # episode -> its partition
        self._num_steps: OrderedDict[int, int] = OrderedDict()  # episode -> its steps so far, if it is split

    def split(self, elements: Sequence[Any], header: Mapping[str, Any]) -> List[Part]:
        """Return each partition's part. Every part has the counts of the whole chunk, and some may have no rows."""
        if self._num == 1:
            return [Part(list(elements), dict(header))]
        if header['kind'] == 'episodes':
            return self._split_episodes(elements, header)
        episodes = [episode_of(each) for each in elements]
        if self._keeps_episodes and all(each is not None for each in episodes):
            chosen = self._by_episode(episodes)
        else:
            chosen = [i * self._num // len(elements) for i in range(len(elements))]
            header = {**header, PIECES: []} if elements and None not in episodes else header
        parts: List[Part] = [Part([], {**header, 'end_idx': []}) for _ in range(self._num)]
        if PIECES in header:
            self._add_pieces(parts, episodes, chosen)
        ends = set(header['end_idx'])
        for i, (element, partition) in enumerate(zip(elements, chosen)):
            part = parts[partition]
            part.elements.append(element)
            is_cut = i + 1 < len(chosen) and chosen[i + 1] != partition and _are_of_one(episodes[i], episodes[i + 1])
            if i in ends or is_cut:
                part.header['end_idx'].append(len(part.elements) - 1)
            self._num_rows[partition] += 1
        return parts

    def _add_pieces(self, parts: List[Part], episodes: Sequence[Optional[int]], chosen: Sequence[int]) -> None:
        for part in parts:
            part.header[PIECES] = []
        before = None
        for episode, partition in zip(episodes, chosen):
            assert episode is not None
            pieces, step = parts[partition].header[PIECES], self._num_steps.pop(episode, 0)
            if before != (episode, partition):
                pieces.append([0, step])
            pieces[-1][0] += 1
            before = episode, partition
            self._num_steps[episode] = step + 1
            if len(self._num_steps) > _MAX_EPISODES:
                self._num_steps.popitem(last=False)

    def _split_episodes(self, elements: Sequence[Any], header: Mapping[str, Any]) -> List[Part]:
        parts: List[Part] = [Part([], {**header, 'lengths': []}) for _ in range(self._num)]
        start = 0
        for length in header['lengths']:
            partition = self._with_fewest_rows()
            parts[partition].elements.extend(elements[start : start + length])
            parts[partition].header['lengths'].append(length)
            self._num_rows[partition] += length
            start += length
        return parts

    def _by_episode(self, episodes: Sequence[Optional[int]]) -> List[int]:
        chosen = []
        planned = list(self._num_rows)
        for each in episodes:
            assert each is not None
            if each not in self._partitions:
                self._partitions[each] = self._with_fewest_rows(planned)
                if len(self._partitions) > _MAX_EPISODES:
                    self._partitions.popitem(last=False)
            self._partitions.move_to_end(each)
            partition = self._partitions[each]
            planned[partition] += 1
            chosen.append(partition)
        return chosen

    def _with_fewest_rows(self, counts: Optional[Sequence[int]] = None) -> int:
        known = self._num_rows if counts is None else counts
        return min(range(self._num), key=lambda i: (known[i], (i - self._first) % self._num))


def _are_of_one(episode: Optional[int], following: Optional[int]) -> bool:
    return episode is not None and episode == following


def episode_of(element: Any) -> Optional[int]:
    """Return the episode that a step belongs to. None: the element is no step, or does not say it."""
    if not isinstance(element, (Mapping, ttorch.Tensor)) or ENV_ID not in element:
        return None
    value = element[ENV_ID]
    try:
        return int(value)
    except (TypeError, ValueError, RuntimeError):  # a sequence has one for each of its steps
        return None
