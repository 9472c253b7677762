"""
Pong, R2D2: stored recurrent state, burn-in, prioritized sequences. DI-engine's own config and one flag.

An element is a sequence of ``burnin_step + learn_unroll_len`` steps, cut by the collector.
"""

from easydict import EasyDict

from ding_store import enable

collector_env_num = 8
evaluator_env_num = 8
pong_r2d2_config = dict(
    exp_name='pong_r2d2_seed0',
    # Sequences are large: 11 MB as floats.
    store=dict(enable=True, max_pending_bytes=2 << 30),
    env=dict(
        collector_env_num=collector_env_num,
        evaluator_env_num=evaluator_env_num,
        n_evaluator_episode=evaluator_env_num,
        stop_value=20,
        env_id='PongNoFrameskip-v4',
        frame_stack=4,
    ),
    policy=dict(
        cuda=True,
        priority=True,
        priority_IS_weight=True,
        model=dict(
            obs_shape=[4, 84, 84],
            action_shape=6,
            encoder_hidden_size_list=[128, 128, 512],
        ),
        discount_factor=0.997,
        nstep=5,
        burnin_step=20,
        learn_unroll_len=80,
        learn=dict(
            update_per_collect=8,
            batch_size=64,
            learning_rate=0.0005,
            target_update_theta=0.001,
        ),
        collect=dict(
            # Number of sequences.
            n_sample=32,
            traj_len_inf=True,
            env_num=collector_env_num,
            # Steps that neighbouring sequences share (Kapturowski et al. 2019: half of them), in the task pipeline.
            overlap=50,
        ),
        eval=dict(env_num=evaluator_env_num, evaluator=dict(eval_freq=1000)),
        other=dict(
            eps=dict(
                type='exp',
                start=0.95,
                end=0.05,
                decay=1e5,
            ),
            replay_buffer=dict(
                replay_buffer_size=10000,
                alpha=0.6,
                beta=0.4,
            ),
        ),
    ),
)
main_config = EasyDict(pong_r2d2_config)
create_config = EasyDict(
    dict(
        env=dict(
            type='atari_ale',
            import_names=['dizoo_configs.atari.atari_env'],
        ),
        env_manager=dict(type='subprocess'),
        policy=dict(type='r2d2'),
    )
)
enable(main_config, create_config)
