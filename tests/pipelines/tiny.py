"""The mains of dizoo_configs with models and numbers so small that a few iterations take a second."""

from dataclasses import replace

from dizoo_configs.command import Options

ENVS = {'env.collector_env_num': 2, 'env.evaluator_env_num': 1, 'env.n_evaluator_episode': 1, 'policy.cuda': False}
NO_EVALUATION = {'policy.eval.evaluator.eval_freq': 10**9}
ATARI = {**ENVS, 'policy.model.encoder_hidden_size_list': [4, 4, 16], 'policy.collect.n_sample': 16}
HEADS = {'policy.model.actor_head_hidden_size': 16, 'policy.model.critic_head_hidden_size': 16}
BATCH = {'policy.learn.batch_size': 8, 'policy.learn.update_per_collect': 2}
R2D2 = {
    'policy.burnin_step': 2,
    'policy.learn_unroll_len': 8,
    'policy.nstep': 2,
    'policy.collect.overlap': 5,
    'policy.learn.batch_size': 4,
    'policy.collect.env_num': 2,
    'policy.eval.env_num': 1,
    'policy.other.replay_buffer.replay_buffer_size': 100,
    'policy.collect.n_sample': 8,
}
IMPALA = {'policy.unroll_len': 8, 'policy.learn.batch_size': 2, 'policy.collect.n_sample': 4}
PPO = {'policy.collect.n_sample': 32, 'policy.learn.batch_size': 8, 'policy.learn.update_per_collect': 4}
A2C = {'policy.collect.n_sample': 16, 'policy.learn.batch_size': 8}
SAC = {
    'policy.random_collect_size': 32,
    'policy.learn.batch_size': 16,
    'env.evaluator_env_num': 1,
    'env.n_evaluator_episode': 1,
}
SMAX = {**ENVS, **BATCH, 'policy.collect.n_sample': 16, 'policy.collect.env_num': 2, 'policy.eval.env_num': 1}
QMIX = {**SMAX, 'policy.collect.n_sample': 2, 'policy.collect.unroll_len': 5, 'policy.learn.batch_size': 2}
GOBIGGER = {**ENVS, **BATCH, 'policy.collect.n_sample': 16, 'env.match_frames': 100}
ATARI_REPLAY = {'policy.other.replay_buffer.replay_buffer_size': 500}

ATARI_DQN = {**ATARI, **BATCH, **ATARI_REPLAY}
APEX = {**ATARI_DQN, 'policy.other.apex.num_collectors': 2}

#: Config -> (main, settings, extra or '', what the extra brings)
PIPELINES = {
    'cartpole_dqn': ('cartpole.cartpole_dqn_main', {**ENVS, **BATCH}, '', ''),
    'cartpole_dqn_per': ('cartpole.cartpole_dqn_main', {**ENVS, **BATCH, 'policy.nstep': 3}, '', ''),
    'cartpole_ppo': ('cartpole.cartpole_ppo_main', {**ENVS, 'policy.collect.n_sample': 6}, '', ''),
    'cartpole_a2c': ('cartpole.cartpole_a2c_main', {**ENVS, **A2C}, '', ''),
    'cartpole_a3c': ('cartpole.cartpole_a2c_main', {**ENVS, **A2C}, '', ''),
    'cartpole_gorila': ('cartpole.cartpole_dqn_main', {**ENVS, **BATCH}, '', ''),
    'pong_a2c': ('atari.atari_a2c_main', {**ATARI, **HEADS, **A2C}, 'atari', 'ale_py'),
    'pong_a3c': ('atari.atari_a2c_main', {**ATARI, **HEADS, **A2C}, 'atari', 'ale_py'),
    'pong_gorila': ('atari.atari_dqn_main', ATARI_DQN, 'atari', 'ale_py'),
    'pong_dqn': ('atari.atari_dqn_main', ATARI_DQN, 'atari', 'ale_py'),
    'pong_dqn_per': ('atari.atari_dqn_main', ATARI_DQN, 'atari', 'ale_py'),
    'qbert_dqn': ('atari.atari_dqn_main', ATARI_DQN, 'atari', 'ale_py'),
    'qbert_dqn_per': ('atari.atari_dqn_main', ATARI_DQN, 'atari', 'ale_py'),
    'pong_apex': ('atari.atari_dqn_main', APEX, 'atari', 'ale_py'),
    'pong_r2d2': ('atari.atari_r2d2_main', {**ATARI, **BATCH, **R2D2}, 'atari', 'ale_py'),
    'qbert_r2d2': ('atari.atari_r2d2_main', {**ATARI, **BATCH, **R2D2}, 'atari', 'ale_py'),
    'pong_impala': ('atari.atari_impala_main', {**ATARI, **BATCH, **HEADS, **IMPALA}, 'atari', 'ale_py'),
    'qbert_impala': ('atari.atari_impala_main', {**ATARI, **BATCH, **HEADS, **IMPALA}, 'atari', 'ale_py'),
    'pong_ppo': ('atari.atari_ppo_main', {**ATARI, **HEADS, **PPO, **ATARI_REPLAY}, 'atari', 'ale_py'),
    'qbert_ppo': ('atari.atari_ppo_main', {**ATARI, **HEADS, **PPO, **ATARI_REPLAY}, 'atari', 'ale_py'),
    'hopper_sac': ('mujoco.hopper_sac_main', {**SAC, **HEADS, 'policy.cuda': False}, 'mujoco', 'mujoco'),
    'smax_3s5z_qmix': ('smac.smac_3s5z_qmix_main', QMIX, 'smax', 'jaxmarl'),
    'smax_3s5z_masac': ('smac.smac_3s5z_masac_main', {**SMAX, **HEADS}, 'smax', 'jaxmarl'),
    'gobigger_dqn': ('gobigger.gobigger_dqn_main', GOBIGGER, 'gobigger', 'gobigger'),
}
#: Those that DI-engine's config pipeline trains, too, and settings that mean another thing there.
SERIAL = {
    'pong_r2d2': {'policy.collect.n_sample': 4},
    'pong_impala': {},
    'hopper_sac': {},
    'smax_3s5z_qmix': {},
    'gobigger_dqn': {},
}


def options(name, **given):
    main, settings, _, _ = PIPELINES[name]
    config = f'dizoo_configs.{main.partition(".")[0]}.{name}_config'
    return Options(config=config, settings=tuple(settings.items()), env_manager='base', **given)


def serial_options(name):
    given = options(name)
    return replace(given, settings=(*given.settings, *SERIAL[name].items()))


def arguments(name):
    """The same as a command line."""
    main, settings, _, _ = PIPELINES[name]
    path = f'dizoo_configs/{main.replace(".", "/")}.py'
    sets = [word for key, value in settings.items() for word in ('--set', f'{key}={value}')]
    return [path, '--config', name, '--env-manager', 'base', *sets]
