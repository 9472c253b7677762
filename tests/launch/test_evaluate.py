"""``ding-store eval``: the policy of a checkpoint plays, and nothing else happens."""

import os
import re

import pytest
from jobs import ROOT, ding_store, job

from ding_store import cli

MAIN = ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_dqn_main.py'


def balancing_weights():
    """Return the weights of the main's network that push the cart to the side to which the pole falls."""
    torch = pytest.importorskip('torch')
    pytest.importorskip('ding')
    from ding.model import DQN

    from dizoo_configs.cartpole.cartpole_dqn_config import main_config

    state = DQN(**main_config.policy.model).state_dict()
    for tensor in state.values():
        tensor.zero_()
        if tensor.dim() == 2 and tensor.shape[1] == 4:  # the first layer: angle and angular velocity
            tensor[0] = torch.tensor([0.0, 0.0, 10.0, 10.0])
            tensor[1] = -tensor[0]
        elif tensor.dim() == 2 and tensor.shape[0] == 2:  # the last one: actions
            tensor[1, 0] = tensor[0, 1] = 1.0
        elif tensor.dim() == 2 and tensor.shape[0] > 2:
            tensor[0, 0] = tensor[1, 1] = 1.0
    return state


@pytest.fixture
def saved(tmp_path):
    """``saved(weights)``: a directory of checkpoints, in the second of which the model has these weights."""
    from ding_store.checkpoint import write_state

    def save(weights):
        os.mkdir(tmp_path / 'ck')
        write_state(str(tmp_path / 'ck' / 'iteration_9.pth.tar'), {'model': {}})
        write_state(str(tmp_path / 'ck' / 'iteration_10.pth.tar'), {'model': weights})

    return save


def test_eval_plays_the_newest_policy_and_writes_nothing(tmp_path, saved):
    saved(balancing_weights())
    arguments = ['eval', 'ck', '--episodes', 3, '--', 'python', '-u', MAIN]
    with job(ding_store(*arguments), tmp_path) as run:
        assert run.wait() == 0, run.text
    assert 'playing the policy of ' + str(tmp_path / 'ck' / 'iteration_10.pth.tar') in run.text
    returns = [float(found) for found in re.findall(r'^episode \d: return (.*)$', run.text, re.M)]
    assert len(returns) == 3
    assert min(returns) > 100  # a policy that has learned nothing has about 9
    mean = re.search(r'^3 episodes: mean return (.*), standard deviation .*$', run.text, re.M)[1]
    assert float(mean) == pytest.approx(sum(returns) / 3, abs=0.001)
    assert sorted(os.listdir(tmp_path)) == ['ck', 'job.out']
    assert len(os.listdir(tmp_path / 'ck')) == 2


def test_eval_of_another_networks_policy_is_refused(tmp_path, saved):
    saved({})
    with job(ding_store('eval', 'ck', '--', 'python', '-u', MAIN), tmp_path) as run:
        assert run.wait() == 2, run.text
    assert "iteration_10.pth.tar does not fit the script's policy" in run.text
    assert 'episode 1' not in run.text


def test_eval_of_a_script_without_evaluator_is_refused(tmp_path, saved):
    saved({})
    (tmp_path / 'main.py').write_text('print("hello")\n')
    with job(ding_store('eval', 'ck', '--', 'python', 'main.py'), tmp_path) as run:
        assert run.wait() == 2, run.text
    assert "ended before it made DI-engine's interaction_evaluator" in run.text


@pytest.mark.parametrize(
    ('arguments', 'text'),
    [
        (['nowhere', '--', 'python', '-m', 'json'], "'nowhere' does not exist. Name a directory that"),
        (['empty', '--', 'python', '-m', 'json'], "'empty' has no checkpoint. Name a directory that"),
        (['empty/x', '--', 'python', '-m', 'json'], 'cannot be read as a checkpoint'),
        (['empty'], 'no command given: put it after --'),
    ],
)
def test_eval_refuses_what_is_no_checkpoint(tmp_path, monkeypatch, capsys, arguments, text):
    monkeypatch.chdir(tmp_path)
    os.mkdir('empty')
    (tmp_path / 'empty' / 'x').write_text('none')
    assert cli.main(['eval', *arguments]) in (1, 2)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize('number', ['0', '-1', 'all', '\u00b2'])
def test_eval_refuses_a_number_of_episodes_that_is_none(capsys, number):
    with pytest.raises(SystemExit):
        cli.main(['eval', 'ck', f'--episodes={number}'])
    assert 'should be a whole number above 0' in capsys.readouterr().err
