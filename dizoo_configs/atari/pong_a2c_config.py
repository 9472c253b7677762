"""Pong A2C, on-policy: DI-engine's own config and one flag. Workers step with the mean of all gradients."""

from easydict import EasyDict

pong_a2c_config = dict(
    exp_name='pong_a2c_seed0',
    store=dict(enable=True, learners=dict(sync='gradients')),
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
        model=dict(
            obs_shape=[4, 84, 84],
            action_shape=6,
            encoder_hidden_size_list=[64, 64, 128],
            actor_head_hidden_size=128,
            critic_head_hidden_size=128,
        ),
        learn=dict(
            batch_size=160,
            adv_norm=False,
            learning_rate=0.0001414,
            value_weight=0.5,
            entropy_weight=0.01,
            grad_norm=0.5,
            betas=(0.0, 0.99),
        ),
        collect=dict(
            n_sample=160,
            unroll_len=1,
            gae_lambda=0.99,
            discount_factor=0.99,
        ),
        eval=dict(evaluator=dict(eval_freq=500)),
    ),
)
main_config = EasyDict(pong_a2c_config)
create_config = EasyDict(
    dict(
        env=dict(
            type='atari_ale',
            import_names=['dizoo_configs.atari.atari_env'],
        ),
        env_manager=dict(type='subprocess'),
        policy=dict(type='a2c'),
    )
)
