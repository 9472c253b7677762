"""Pong, DQN with 3-step returns: DI-engine's own config and one flag."""

from easydict import EasyDict

from ding_store import enable

pong_dqn_config = dict(
    exp_name='pong_dqn_seed0',
    store=dict(enable=True),
    env=dict(
        collector_env_num=8,
        evaluator_env_num=8,
        n_evaluator_episode=8,
        stop_value=20,
        env_id='PongNoFrameskip-v4',
        frame_stack=4,
    ),
    policy=dict(
        cuda=True,
        priority=False,
        priority_IS_weight=False,
        model=dict(
            obs_shape=[4, 84, 84],
            action_shape=6,
            encoder_hidden_size_list=[128, 128, 512],
        ),
        nstep=3,
        discount_factor=0.99,
        learn=dict(
            update_per_collect=10,
            batch_size=32,
            learning_rate=0.0001,
            target_update_freq=500,
        ),
        collect=dict(n_sample=96),
        eval=dict(evaluator=dict(eval_freq=4000)),
        other=dict(
            eps=dict(
                type='exp',
                start=1.0,
                end=0.05,
                decay=250000,
            ),
            replay_buffer=dict(replay_buffer_size=100000),
        ),
    ),
)
main_config = EasyDict(pong_dqn_config)
create_config = EasyDict(
    dict(
        env=dict(
            type='atari_ale',
            import_names=['dizoo_configs.atari.atari_env'],
        ),
        env_manager=dict(type='subprocess'),
        policy=dict(type='dqn'),
        replay_buffer=dict(type='deque', import_names=['ding.data.buffer.deque_buffer_wrapper']),
    )
)
enable(main_config, create_config)
