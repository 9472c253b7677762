"""
SMAC 3s5z MASAC in StarCraft II: DI-engine's own config with a model that its policy can call, and one flag.

Run it in the config pipeline:

> ding -m serial -c dizoo_configs/smac/smac_3s5z_masac_config.py -s 0

For SMAX, use smax_3s5z_masac_config.py. For several processes, use the task pipeline: smac_3s5z_masac_main.py.
"""

from easydict import EasyDict

from ding_store import enable

smac_3s5z_masac_config = dict(
    exp_name='smac_3s5z_masac_seed0',
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
        death_mask=True,
        special_global_state=True,
        manager=dict(shared_memory=False, reset_timeout=6000),
    ),
    policy=dict(
        cuda=False,
        multi_agent=True,
        random_collect_size=0,
        model=dict(
            type='smac_maqac',
            import_names=['dizoo_configs.smac.policies'],
            agent_obs_shape=150,
            global_obs_shape=295,
            action_shape=14,
            twin_critic=True,
            actor_head_hidden_size=256,
            critic_head_hidden_size=256,
        ),
        learn=dict(
            update_per_collect=50,
            batch_size=320,
            learning_rate_q=5e-4,
            learning_rate_policy=5e-4,
            learning_rate_alpha=5e-5,
            ignore_done=False,
            target_theta=0.005,
            discount_factor=0.99,
            alpha=0.2,
            auto_alpha=True,
            log_space=True,
        ),
        collect=dict(env_num=8, n_sample=1600, unroll_len=1),
        eval=dict(env_num=8, evaluator=dict(eval_freq=500)),
        other=dict(
            eps=dict(
                type='linear',
                start=1,
                end=0.05,
                decay=100000,
            ),
            replay_buffer=dict(replay_buffer_size=1000000),
        ),
    ),
)
main_config = EasyDict(smac_3s5z_masac_config)
create_config = EasyDict(
    dict(
        env=dict(type='smac_starcraft', import_names=['dizoo_configs.smac.starcraft_env']),
        env_manager=dict(type='subprocess'),
        policy=dict(type='discrete_sac'),
        replay_buffer=dict(type='deque', import_names=['ding.data.buffer.deque_buffer_wrapper']),
    )
)
enable(main_config, create_config)
