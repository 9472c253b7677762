"""
GoBigger DQN with 4 teams of 3 players, and one flag. Run it in the config pipeline:

> ding -m serial -c dizoo_configs/gobigger/gobigger_dqn_config.py -s 0

For several processes, use the task pipeline: gobigger_dqn_main.py.
"""

from easydict import EasyDict

from ding_store import enable

gobigger_dqn_config = dict(
    exp_name='gobigger_dqn_seed0',
    store=dict(enable=True),
    env=dict(
        collector_env_num=4,
        evaluator_env_num=4,
        n_evaluator_episode=20,
        # Returns are the growth of the logarithm of a score, which has no upper limit.
        stop_value=1e10,
        team_num=4,
        player_num_per_team=3,
        match_frames=3600,
        frame_skip=10,
        bot_level=3,
        manager=dict(shared_memory=False),
    ),
    policy=dict(
        cuda=False,
        priority=True,
        priority_IS_weight=False,
        model=dict(
            type='gobigger_dqn',
            import_names=['dizoo_configs.gobigger.gobigger_model'],
            team_num=4,
            action_shape=16,
            encoder_hidden_size_list=[128, 64],
        ),
        nstep=1,
        discount_factor=0.95,
        learn=dict(
            update_per_collect=4,
            batch_size=64,
            learning_rate=0.0005,
            target_update_freq=200,
            # A match ends by a time limit, which is not terminal.
            ignore_done=True,
        ),
        collect=dict(n_sample=64, unroll_len=1),
        eval=dict(evaluator=dict(eval_freq=1000)),
        other=dict(
            eps=dict(
                type='exp',
                start=0.95,
                end=0.05,
                decay=20000,
            ),
            replay_buffer=dict(replay_buffer_size=100000),
        ),
    ),
)
main_config = EasyDict(gobigger_dqn_config)
create_config = EasyDict(
    dict(
        env=dict(type='gobigger', import_names=['dizoo_configs.gobigger.gobigger_env']),
        env_manager=dict(type='base'),
        policy=dict(type='gobigger_dqn', import_names=['dizoo_configs.gobigger.gobigger_policy']),
        # For runs with the flag off: DI-engine's 'deque' has its own priorities, which the policy's do not reach.
        replay_buffer=dict(type='advanced'),
    )
)
enable(main_config, create_config)
