"""World models of DI-engine on the store's buffer: the calls of MBPO and Dreamer, in their own pipelines."""

import copy
import os
from typing import Any, List

import pytest
from ding.entry import serial_entry_mbrl
from ding.entry.serial_entry_mbrl import serial_pipeline_dreamer, serial_pipeline_dyna
from easydict import EasyDict
from tensorboardX import SummaryWriter

import ding_store
from ding_store.buffer import StoreBufferWrapper


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> List[tuple]:
    """The arguments and results of all samples."""
    seen: List[tuple] = []
    sample = StoreBufferWrapper.sample

    def record(buffer: StoreBufferWrapper, *args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs, sample(buffer, *args, **kwargs)))
        return seen[-1][-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(StoreBufferWrapper, 'sample', record)
    # DI-engine's buffers log from a thread that never ends, into a file that is made again: here, not where a later
    # test is.
    monkeypatch.setattr(serial_entry_mbrl, 'SummaryWriter', lambda path: SummaryWriter(os.path.abspath(path)))
    return seen


def pendulum(policy: dict, world_model: dict) -> EasyDict:
    return EasyDict(
        exp_name='world_model',
        env=dict(
            collector_env_num=1,
            evaluator_env_num=1,
            n_evaluator_episode=1,
            stop_value=1e9,
            act_scale=True,
            continuous=True,
        ),
        policy=dict(
            cuda=False,
            random_collect_size=64,
            eval=dict(evaluator=dict(eval_freq=10**6)),
            other=dict(replay_buffer=dict(replay_buffer_size=1000)),
            **policy,
        ),
        world_model=dict(train_freq=16, cuda=False, **world_model),
        store=dict(enable=True),
    )


def created(policy: str, world_model: str, **buffers: Any) -> EasyDict:
    return EasyDict(
        env=dict(type='mbpendulum', import_names=['dizoo.classic_control.pendulum.envs.pendulum_env']),
        env_manager=dict(type='base'),
        policy=dict(type=policy, import_names=['ding.policy.sac', 'ding.policy.mbpolicy.dreamer']),
        world_model=dict(type=world_model, import_names=[f'ding.world_model.{world_model}']),
        **{name: dict(type=type_) for name, type_ in buffers.items()},
    )


@pytest.mark.parametrize(
    ('way', 'imagination'),
    [('flag', 'elastic'), ('flag', 'store'), pytest.param('keys', 'elastic', marks=pytest.mark.long)],
)
def test_mbpo_trains_on_the_store_buffer(sampled: List[tuple], way: str, imagination: str) -> None:
    main = pendulum(
        policy=dict(
            model=dict(
                obs_shape=3,
                action_shape=1,
                twin_critic=True,
                action_space='reparameterization',
                actor_head_hidden_size=16,
                critic_head_hidden_size=16,
            ),
            learn=dict(update_per_collect=2, batch_size=20, ignore_done=True, auto_alpha=True),
            collect=dict(n_sample=16, unroll_len=1),
        ),
        world_model=dict(
            eval_freq=16,
            rollout_length_scheduler=dict(
                type='linear',
                rollout_start_step=0,
                rollout_end_step=100,
                rollout_length_min=1,
                rollout_length_max=1,
            ),
            model=dict(
                ensemble_size=3,
                elite_size=2,
                state_size=3,
                action_size=1,
                reward_size=1,
                hidden_size=16,
                use_decay=True,
                batch_size=32,
                holdout_ratio=0.1,
                max_epochs_since_update=1,
                deterministic_rollout=True,
            ),
            other=dict(
                real_ratio=0.25,
                rollout_batch_size=100,
                rollout_retain=4,
                imagination_buffer=dict(type='elastic', replay_buffer_size=6000),
            ),
        ),
    )
    create = created('sac', 'mbpo', replay_buffer='naive', imagination_buffer=imagination)
    if imagination == 'store':
        create.imagination_buffer = dict(type='store', import_names=['ding_store.buffer'], priority=False)
    if way == 'keys':
        create.replay_buffer = dict(type='store', import_names=['ding_store.buffer'])
    else:
        assert ding_store.enable(main, create)
    serial_pipeline_dyna((main, create), seed=0, max_train_iter=6)
    sizes = {args[0] for args, _, _ in sampled}
    assert {5, 16, 100} <= sizes  # For the policy, for evaluation of the model, and its rollouts,
    assert any(args[0] > 64 and not kwargs for args, kwargs, _ in sampled)  # and all that there is, for its training.
    assert any(kwargs == {'replace': True} for _, kwargs, _ in sampled)
    assert all(len(batch) == args[0] for args, _, batch in sampled)


def test_dreamer_trains_on_the_store_buffer(sampled: List[tuple]) -> None:
    main = pendulum(
        policy=dict(
            imag_horizon=3,
            learn=dict(
                lambda_=0.95,
                learning_rate=3e-5,
                batch_size=2,
                batch_length=8,
                imag_sample=True,
                discount=0.997,
                reward_EMA=True,
                learner=dict(),
            ),
            collect=dict(n_sample=1, unroll_len=1, action_size=1, collect_dyn_sample=True),
            command=dict(),
            model=dict(
                action_shape=1,
                actor_dist='normal',
                dyn_stoch=4,
                dyn_deter=8,
                dyn_discrete=4,
                units=8,
            ),
        ),
        world_model=dict(
            pretrain=2,
            model=dict(
                state_size=3,
                obs_type='vector',
                action_size=1,
                action_type='continuous',
                reward_size=1,
                dyn_stoch=4,
                dyn_deter=8,
                dyn_hidden=8,
                dyn_discrete=4,
                units=8,
                encoder_hidden_size_list=[8, 8],
                device='cpu',
            ),
        ),
    )
    main.world_model.train_freq = 2
    create = created('dreamer', 'dreamer', replay_buffer='sequence')
    assert ding_store.enable(main, create)
    serial_pipeline_dreamer((copy.deepcopy(main), create), seed=0, max_train_iter=4)
    assert len(sampled) >= 4
    assert all(args[:2] == (2, 8) for args, _, _ in sampled)
    for _, _, data in sampled:
        assert [len(steps) for steps in data] == [8, 8]
