"""
SMAC 3s5z QMIX in StarCraft II: DI-engine's own config and one flag. Run it in the config pipeline:

> ding -m serial -c dizoo_configs/smac/smac_3s5z_qmix_config.py -s 0

For SMAX, use smax_3s5z_qmix_config.py. For several processes, use the task pipeline: smac_3s5z_qmix_main.py.
"""

from easydict import EasyDict

from ding_store import enable

smac_3s5z_qmix_config = dict(
    exp_name='smac_3s5z_qmix_seed0',
    store=dict(enable=True),
    env=dict(
        map_name='3s5z',
        difficulty=7,
        reward_only_positive=True,
        mirror_opponent=False,
        agent_num=8,
        collector_env_num=8,
        evaluator_env_num=8,
        n_evaluator_episode=32,
        # Share of the battles that are won.
        stop_value=0.99,
        manager=dict(shared_memory=False, reset_timeout=6000),
    ),
    policy=dict(
        cuda=False,
        model=dict(
            agent_num=8,
            obs_shape=150,
            global_obs_shape=216,
            action_shape=14,
            hidden_size_list=[32],
            mixer=True,
        ),
        learn=dict(
            update_per_collect=10,
            batch_size=32,
            learning_rate=0.0005,
            clip_value=5,
            target_update_theta=0.008,
            discount_factor=0.95,
        ),
        # Sequences of 20 steps: 290 KB each.
        collect=dict(n_sample=32, unroll_len=20, env_num=8),
        eval=dict(env_num=8, evaluator=dict(eval_freq=500)),
        other=dict(
            eps=dict(
                type='linear',
                start=1,
                end=0.05,
                decay=100000,
            ),
            replay_buffer=dict(replay_buffer_size=50000),
        ),
    ),
)
main_config = EasyDict(smac_3s5z_qmix_config)
create_config = EasyDict(
    dict(
        env=dict(type='smac_starcraft', import_names=['dizoo_configs.smac.starcraft_env']),
        env_manager=dict(type='subprocess'),
        policy=dict(type='qmix'),
        replay_buffer=dict(type='deque', import_names=['ding.data.buffer.deque_buffer_wrapper']),
    )
)
enable(main_config, create_config)
