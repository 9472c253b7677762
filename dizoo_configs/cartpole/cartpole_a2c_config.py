"""CartPole A2C, on-policy: DI-engine's own config and one flag. Workers step with the mean of all gradients."""

from easydict import EasyDict

cartpole_a2c_config = dict(
    exp_name='cartpole_a2c_seed0',
    store=dict(enable=True, learners=dict(sync='gradients')),
    env=dict(
        collector_env_num=8,
        evaluator_env_num=5,
        n_evaluator_episode=5,
        stop_value=195,
    ),
    policy=dict(
        cuda=False,
        model=dict(
            obs_shape=4,
            action_shape=2,
            encoder_hidden_size_list=[128, 128, 64],
        ),
        learn=dict(
            batch_size=40,
            learning_rate=0.001,
            entropy_weight=0.01,
        ),
        collect=dict(
            n_sample=80,
            unroll_len=1,
            gae_lambda=0.95,
        ),
        eval=dict(evaluator=dict(eval_freq=50)),
    ),
)
main_config = EasyDict(cartpole_a2c_config)
create_config = EasyDict(
    dict(
        env=dict(
            type='cartpole',
            import_names=['dizoo.classic_control.cartpole.envs.cartpole_env'],
        ),
        env_manager=dict(type='base'),
        policy=dict(type='a2c'),
    )
)
