"""
Pong, IMPALA: collectors feed a queue of trajectories, and the learner uses each at most ``max_use`` times.
DI-engine's own config and one flag.

An element is a trajectory of ``unroll_len`` steps, cut by the collector. ``n_sample`` counts trajectories.
"""

from easydict import EasyDict

from ding_store import enable

pong_impala_config = dict(
    exp_name='pong_impala_seed0',
    store=dict(enable=True, max_pending_bytes=2 << 30),
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
        unroll_len=64,
        model=dict(
            obs_shape=[4, 84, 84],
            action_shape=6,
            encoder_hidden_size_list=[64, 128, 256],
            critic_head_hidden_size=256,
            critic_head_layer_num=2,
            actor_head_hidden_size=256,
            actor_head_layer_num=2,
        ),
        learn=dict(
            update_per_collect=2,
            batch_size=8,
            grad_clip_type='clip_norm',
            clip_value=0.5,
            learning_rate=0.0006,
            value_weight=0.5,
            entropy_weight=0.01,
            discount_factor=0.99,
            lambda_=0.95,
            rho_clip_ratio=1.0,
            c_clip_ratio=1.0,
            rho_pg_clip_ratio=1.0,
        ),
        collect=dict(n_sample=16),
        eval=dict(evaluator=dict(eval_freq=2000)),
        other=dict(
            replay_buffer=dict(
                replay_buffer_size=10000,
                # A queue, each trajectory once, as in the paper (Espeholt et al. 2018).
                sampler='fifo',
                max_use=1,
            ),
        ),
    ),
)
main_config = EasyDict(pong_impala_config)
create_config = EasyDict(
    dict(
        env=dict(
            type='atari_ale',
            import_names=['dizoo_configs.atari.atari_env'],
        ),
        env_manager=dict(type='subprocess'),
        policy=dict(type='impala'),
    )
)
enable(main_config, create_config)
