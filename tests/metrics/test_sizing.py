"""How many collectors a run chooses: a model of a run, with collectors and a learner of known speeds."""

import pytest

from ding_store.metrics.figures import Figures
from ding_store.metrics.sizing import HOLD_S, Sizing, collectors_needed


class Model:
    """
    A run in which a collector makes ``per_s`` steps/s, and the learner can read ``learner_per_s``. Only ``cores``
    collectors compute at once.
    """

    def __init__(self, sizing, number, per_s, learner_per_s, cores=1e9, blocked=0.0):
        self.sizing, self.number = sizing, number
        self.per_s, self.learner_per_s, self.cores, self.blocked = per_s, learner_per_s, cores, blocked
        self.now_s, self.figures = 0.0, dict(up=0.0, wait=0.0, steps=0.0, cup=0.0, cwait=0.0, cappend=0.0)
        self.numbers, self.starved = [number], 0.0

    def run(self, seconds):
        for _ in range(int(seconds)):
            made = self.per_s * min(self.number, self.cores)
            read = min(made, self.learner_per_s)
            self.starved = max(0.0, 1.0 - made / self.learner_per_s)
            f = self.figures
            f['up'] += 1.0
            f['wait'] += self.starved
            f['steps'] += read
            f['cup'] += self.number
            f['cwait'] += self.number * max(0.0, 1.0 - read / made)
            f['cappend'] += self.number * self.blocked
            self.now_s += 1.0
            after = self.sizing.step(self.now_s, self.as_figures(), self.number)
            if after != self.number:
                self.numbers.append(after)
            self.number = after
        return self.number

    def as_figures(self):
        f = self.figures
        return Figures(
            rows_ingested=int(f['steps']),
            learner='l',
            learner_step=int(f['steps']),
            learner_s=dict(up=f['up'], wait_experience=f['wait']),
            num_collectors=self.number,
            collector_s=dict(up=f['cup'], wait_learner=f['cwait'], append=f['cappend']),
        )


@pytest.mark.parametrize(('per_s', 'needed'), [(10, 10), (25, 4), (40, 3), (100, 2), (5, 16)])
def test_sizing_finds_what_the_learner_needs_in_two_minutes(per_s, needed):
    model = Model(Sizing(2, 16), 2, per_s, 100.0)
    number = model.run(120)
    assert needed <= number <= needed * 1.25
    assert model.starved < 0.1 or number == 16
    assert len(model.numbers) <= 4
    assert model.run(600) == number, 'it goes on changing'


def test_sizing_gives_up_collectors_that_wait():
    model = Model(Sizing(2, 16), 16, 25.0, 100.0)
    assert 4 <= model.run(120) <= 6
    assert model.starved < 0.1


def test_sizing_on_a_full_host_goes_back_and_waits():
    model = Model(Sizing(2, 16), 2, 10.0, 100.0, cores=2)
    assert model.run(60) == 2
    assert model.numbers == [2, 6, 2]
    assert 'hardly more env steps' in model.sizing.reason
    assert model.run(HOLD_S - 60) == 2
    assert model.numbers == [2, 6, 2], 'it has tried again too soon'


def test_sizing_adds_none_if_collectors_wait_for_the_store():
    model = Model(Sizing(2, 16), 2, 10.0, 100.0, blocked=0.5)
    assert model.run(120) == 2


def test_sizing_waits_until_all_collectors_report():
    sizing, model = Sizing(2, 16), None
    model = Model(sizing, 2, 10.0, 100.0)
    as_figures = model.as_figures

    def fewer():
        figures = as_figures()
        figures.num_collectors -= 1
        return figures

    model.as_figures = fewer
    assert model.run(30) == 2
    model.as_figures = as_figures
    assert model.run(60) > 2


def test_needed_collectors_follow_both_waits():
    assert collectors_needed({}, 4) is None
    assert collectors_needed({'learner_wait_experience': 0.5}, 4) == 8.0
    assert collectors_needed({'learner_wait_experience': 0.0, 'collector_wait_learner': 0.75}, 8) == 2.0
    assert collectors_needed({'learner_wait_experience': 1.0}, 4) == 4 * 3.0  # one step up is limited
    assert collectors_needed({'learner_wait_experience': 0.5}, 0) is None
