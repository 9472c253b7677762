"""SMAC: battles of SMAX, StarCraft II up to the game itself, and stock and store given the same."""

import multiprocessing
import os
import stat
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from jobs import ROOT, environment
from needs import need_extra

pytest.importorskip('ding')

import smac_jobs  # noqa: E402
import torch  # noqa: E402
import treetensor.torch as ttorch  # noqa: E402
from ding.framework.context import OnlineRLContext  # noqa: E402
from easydict import EasyDict  # noqa: E402
from same_experience import same  # noqa: E402

from ding_store.middleware.trajectories import Unroller  # noqa: E402
from dizoo_configs import extras  # noqa: E402
from dizoo_configs.smac import smac_3s5z_masac_config, smac_3s5z_qmix_config, smax_env, starcraft_env  # noqa: E402
from dizoo_configs.smac.smax_env import SMAXEnv  # noqa: E402
from dizoo_configs.smac.starcraft_env import StarCraftEnv  # noqa: E402

pytestmark = pytest.mark.timeout(300)
CONFIGS = {'qmix': smac_3s5z_qmix_config, 'masac': smac_3s5z_masac_config}


class Child:
    """Runs functions in a process that keeps what it has compiled, also for processes with the same TMPDIR."""

    def __init__(self, directory):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv('TMPDIR', str(directory))
            patch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
            self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn'))
            self(os.getpid)  # starts the process

    def __call__(self, function):
        return self.pool.submit(function).result(150)


@pytest.fixture(scope='module')
def child():
    """It loads what other tests of the session have compiled."""
    need_extra('jaxmarl', 'smax')
    child = Child(tempfile.gettempdir())
    with child.pool:
        yield child


@pytest.mark.long
def test_smax_battles_have_valid_observations(child):
    child(smac_jobs.check_battle)


def test_smax_sizes_equal_those_of_the_game(child):
    child(smac_jobs.check_sizes)


def test_smax_battles_follow_their_seeds(child):
    child(smac_jobs.check_seeds)


@pytest.mark.long
def test_smax_battle_is_compiled_once_per_machine(tmp_path):
    need_extra('jaxmarl', 'smax')
    one, other = Child(tmp_path), Child(tmp_path)
    with one.pool, other.pool:
        compiled, misses, hits = one(smac_jobs.first_steps)
        loaded, no_misses, all_hits = other(smac_jobs.first_steps)
    assert (misses > 0, hits) == (True, 0)
    assert (no_misses, all_hits) == (0, misses)
    assert all(map(same, compiled, loaded))
    (kept,) = tmp_path.glob('ding-store-smax-*')
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700


def test_smax_without_a_private_directory_compiles_per_process(tmp_path, monkeypatch):
    """Such as one that another user made: what lies there may be anything."""
    jax = types.SimpleNamespace(config=types.SimpleNamespace(jax_compilation_cache_dir=None))
    monkeypatch.setitem(sys.modules, 'jax', jax)  # without ``update``: it would raise
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    (tmp_path / f'ding-store-smax-{os.geteuid()}').mkdir(mode=0o755)
    smax_env.keep_compiled()


def test_qmix_losses_equal_those_of_plain_di_engine(child):
    size = child(smac_jobs.qmix_losses)
    # A sequence of 20 steps. In StarCraft II its observations are smaller: then it has the published size.
    assert size - 20 * (smac_jobs.SMAX_STEP - smac_jobs.STARCRAFT_STEP) == pytest.approx(290_000, rel=0.03)


def test_masac_losses_equal_those_of_plain_di_engine(child):
    assert child(smac_jobs.masac_losses) == pytest.approx(29_000, rel=0.1)


def test_sequences_of_structured_observations_are_stored():
    def step(number, done):
        obs = {'agent_state': torch.full((2, 3), float(number)), 'action_mask': torch.ones(2, 4)}
        rest = dict(reward=torch.ones(1), done=torch.tensor(done), env_data_id=torch.tensor([0]))
        return ttorch.as_tensor(dict(obs=obs, prev_state=dict(h=torch.ones(2)), **rest))

    ctx = OnlineRLContext(trajectories=[step(1, False), step(2, True)], trajectory_end_idx=[1])
    Unroller(3)(ctx)
    (sequence,) = ctx.trajectories
    assert [each[0, 0].item() for each in sequence['obs']['agent_state']] == [1.0, 2.0, 0.0]
    assert [each.sum().item() for each in sequence['obs']['action_mask']] == [8.0, 8.0, 0.0]
    assert [bool(each) for each in sequence['done']] == [False, True, True]
    assert [state.keys() for state in sequence['prev_state']] == [{'h'}] * 3, 'policies want states as they are'


def test_masac_model_accepts_earlier_inputs():
    smac_jobs.model_takes_what_it_took()


def test_smax_unknown_map_is_refused():
    with pytest.raises(ValueError, match=r"env.map_name \('5z'\) must be one of 3m, 2s3z, 3s5z"):
        SMAXEnv(EasyDict(map_name='5z'))


@pytest.mark.parametrize(
    ('make', 'extra'),
    [
        (lambda: StarCraftEnv(EasyDict(map_name='3s5z')), 'smac'),
        (lambda: SMAXEnv(EasyDict(map_name='3s5z')).reset(), 'smax'),
    ],
)
def test_smax_without_its_extra_names_the_install(monkeypatch, make, extra):
    monkeypatch.setattr(extras.importlib, 'import_module', lacking)
    with pytest.raises(ModuleNotFoundError, match=rf'scripts/setup.sh --extra {extra}.*\[{extra}\]'):
        make()


def lacking(name):
    raise ModuleNotFoundError(f'No module named {name!r}', name=name)


# --- StarCraft II, as far as it goes without the game ---------------------------------------------------------------


@pytest.mark.parametrize('algorithm', sorted(CONFIGS))
def test_starcraft_without_the_game_is_refused(algorithm, tmp_path, monkeypatch):
    need_extra('pysc2', 'smac')
    monkeypatch.setenv('SC2PATH', str(tmp_path))
    env = StarCraftEnv(CONFIGS[algorithm].main_config.env)
    with pytest.raises(FileNotFoundError, match=rf'(?s)no StarCraft II in {tmp_path}.*SC2PATH'):
        env.reset()
    env.close()


@pytest.mark.long
def test_main_without_starcraft_ends_with_the_fix(tmp_path):
    need_extra('pysc2', 'smac')
    command = [sys.executable, '-u', str(ROOT / 'dizoo_configs' / 'smac' / 'smac_3s5z_qmix_main.py')]
    done = subprocess.run(
        command, env=environment(SC2PATH=str(tmp_path)), cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    what, how, instead = done.stderr.splitlines()[-3:]
    assert what == f'FileNotFoundError: no StarCraft II in {tmp_path}.'
    assert 'SC2PATH' in how
    assert '--config smax_3s5z_qmix' in instead
    assert 'Env Process Exception' not in done.stdout + done.stderr


class Game:
    """
    The game's end of the connection: two armies of 3s5z in the game's own messages. It does as it is told in so far as
    that is needed: who is attacked dies.
    """

    def __init__(self):
        from s2clientprotocol import raw_pb2, sc2api_pb2

        self.messages, self.size = sc2api_pb2, 32
        self.info = sc2api_pb2.ResponseGameInfo()
        raw = self.info.start_raw
        raw.map_size.x = raw.map_size.y = self.size
        raw.playable_area.p1.x = raw.playable_area.p1.y = self.size
        raw.pathing_grid.bits_per_pixel, raw.terrain_height.bits_per_pixel = 1, 8
        raw.pathing_grid.data = b'\xff' * (self.size * self.size // 8)
        raw.terrain_height.data = bytes([128]) * self.size**2
        self.units = {}
        for owner in (1, 2):
            for number in range(8):
                is_stalker = number < 3
                unit = raw_pb2.Unit(tag=100 * owner + number, owner=owner, unit_type=74 if is_stalker else 73)
                unit.pos.x, unit.pos.y = 12 + 4 * owner, 12 + number
                unit.health = unit.health_max = 80 if is_stalker else 100
                unit.shield = unit.shield_max = 80 if is_stalker else 50
                self.units[unit.tag] = unit
        self.attacked = []

    def observe(self, **_):
        response = self.messages.ResponseObservation()
        response.observation.raw_data.units.extend(self.units.values())
        return self.messages.ResponseObservation.FromString(response.SerializeToString())

    def debug(self, command):
        assert command.kill_unit.IsInitialized()

    def actions(self, request):
        for action in request.actions:
            target = action.action_raw.unit_command.target_unit_tag
            if target:
                self.attacked.append(target)
                self.units.pop(target, None)

    def step(self, count):
        assert count > 0

    def quit(self):
        """Nothing runs."""


@pytest.fixture
def game(monkeypatch):
    need_extra('pysc2', 'smac')
    starcraft_env.game_class()
    from pysc2.env import sc2_env
    from pysc2.lib import run_parallel

    def start(env, map_name, **_):
        assert map_name == '3s5z'
        env._controllers, env._step_mul = [game], 8
        env._game_info, env._parallel = [game.info], run_parallel.RunParallel()

    game = Game()
    monkeypatch.setattr(sc2_env.SC2Env, '__init__', start)
    monkeypatch.setattr(sc2_env.SC2Env, 'close', lambda env: None)
    return game


@pytest.mark.parametrize(('algorithm', 'state'), [('qmix', (216,)), ('masac', (8, 295))])
def test_starcraft_reads_messages_of_the_game(game, algorithm, state):
    env = StarCraftEnv(CONFIGS[algorithm].main_config.env)
    env.seed(0)
    shapes = dict(agent_state=(8, 150), global_state=state, action_mask=(8, 14))

    def check(obs):
        assert {key: value.shape for key, value in obs.items()} == shapes
        assert {value.dtype for value in obs.values()} == {np.dtype('float32')}
        assert all(np.isfinite(value).all() for value in obs.values())

    obs = env.reset()
    check(obs)
    assert obs['action_mask'][:, 0].sum() == 0, 'who lives may not do nothing'
    assert obs['action_mask'][:, 6:].any(), 'somebody is in reach'
    timestep = env.step(np.ones(8, np.int64))
    check(timestep.obs)
    assert timestep.reward.shape == (1,)
    assert timestep.done is False
    returned = 0.0
    while not timestep.done:
        mask = timestep.obs['action_mask']
        # The last that is allowed: attack where somebody is in reach.
        timestep = env.step(np.array([np.flatnonzero(each)[-1] for each in mask]))
        returned += timestep.reward.item()
        check(timestep.obs)
    assert len(set(game.attacked)) == 8
    assert timestep.info['battle_won']
    assert timestep.info['eval_episode_return'] == np.ones(1, np.float32)
    assert returned > 0
    env.close()


def test_starcraft_messages_fit_the_installed_protobuf():
    need_extra('pysc2', 'smac')
    starcraft_env.game_class()
    from google.protobuf.internal import api_implementation
    from s2clientprotocol import sc2api_pb2

    request = sc2api_pb2.Request(id=7)
    request.join_game.race = 3
    assert sc2api_pb2.Request.FromString(request.SerializeToString()) == request
    assert api_implementation.Type() == 'upb', 'not the slow one'
    assert 'PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION' not in os.environ
