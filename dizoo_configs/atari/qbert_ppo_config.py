"""Qbert, PPO off-policy: the learner uses a step at most ``max_use`` times. DI-engine's own config and one flag."""

from easydict import EasyDict

from ding_store import enable

qbert_ppo_config = dict(
    exp_name='qbert_ppo_seed0',
    store=dict(enable=True),
    env=dict(
        collector_env_num=16,
        evaluator_env_num=8,
        n_evaluator_episode=8,
        stop_value=int(1e10),
        env_id='QbertNoFrameskip-v4',
        frame_stack=4,
    ),
    policy=dict(
        cuda=True,
        model=dict(
            obs_shape=[4, 84, 84],
            action_shape=6,
            encoder_hidden_size_list=[32, 64, 64, 128],
            actor_head_hidden_size=128,
            critic_head_hidden_size=128,
            critic_head_layer_num=2,
        ),
        learn=dict(
            update_per_collect=24,
            batch_size=128,
            adv_norm=False,
            learning_rate=0.0001,
            value_weight=1.0,
            entropy_weight=0.03,
            clip_ratio=0.1,
        ),
        collect=dict(
            n_sample=1024,
            gae_lambda=0.95,
            discount_factor=0.99,
        ),
        eval=dict(evaluator=dict(eval_freq=1000)),
        other=dict(
            replay_buffer=dict(
                replay_buffer_size=100000,
                max_use=3,
            ),
        ),
    ),
)
main_config = EasyDict(qbert_ppo_config)
create_config = EasyDict(
    dict(
        env=dict(
            type='atari_ale',
            import_names=['dizoo_configs.atari.atari_env'],
        ),
        env_manager=dict(type='subprocess'),
        policy=dict(type='ppo_offpolicy'),
    )
)
enable(main_config, create_config)
