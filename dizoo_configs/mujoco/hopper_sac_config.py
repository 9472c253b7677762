"""Hopper, SAC: DI-engine's own config and one flag."""

from easydict import EasyDict

from ding_store import enable

hopper_sac_config = dict(
    exp_name='hopper_sac_seed0',
    store=dict(enable=True),
    env=dict(
        env_id='Hopper-v5',
        norm_obs=dict(use_norm=False),
        norm_reward=dict(use_norm=False),
        collector_env_num=1,
        evaluator_env_num=8,
        n_evaluator_episode=8,
        stop_value=6000,
        action_clip=False,
        delay_reward_step=0,
        replay_path=None,
        save_replay_gif=False,
        replay_path_gif=None,
        action_bins_per_branch=None,
    ),
    policy=dict(
        cuda=True,
        random_collect_size=10000,
        model=dict(
            obs_shape=11,
            action_shape=3,
            twin_critic=True,
            action_space='reparameterization',
            actor_head_hidden_size=256,
            critic_head_hidden_size=256,
        ),
        learn=dict(
            update_per_collect=1,
            batch_size=256,
            learning_rate_q=1e-3,
            learning_rate_policy=1e-3,
            learning_rate_alpha=3e-4,
            ignore_done=False,
            target_theta=0.005,
            discount_factor=0.99,
            alpha=0.2,
            reparameterization=True,
            auto_alpha=False,
        ),
        collect=dict(
            n_sample=1,
            unroll_len=1,
        ),
        eval=dict(evaluator=dict(eval_freq=1000)),
        other=dict(replay_buffer=dict(replay_buffer_size=1000000)),
    ),
)
main_config = EasyDict(hopper_sac_config)
create_config = EasyDict(
    dict(
        env=dict(
            type='mujoco_gymnasium',
            import_names=['dizoo_configs.mujoco.mujoco_env'],
        ),
        env_manager=dict(type='base'),
        policy=dict(type='sac', import_names=['ding.policy.sac']),
        replay_buffer=dict(type='naive'),
    )
)
enable(main_config, create_config)
