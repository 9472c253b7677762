"""Override that moves a pipeline of this folder from StarCraft II to SMAX."""

from __future__ import annotations

from easydict import EasyDict

from dizoo_configs.smac.smax_env import SIZES


def on_smax(main_config: EasyDict, create_config: EasyDict) -> None:
    """
    Overview:
        Change a pair of configs in place: the battle, the sizes of the model's inputs, and the experiment's name. The
        name shows that the results are SMAX's.
    """
    agents, obs, state, actions = SIZES[main_config.env.map_name]
    model = main_config.policy.model
    main_config.exp_name = main_config.exp_name.replace('smac_', 'smax_', 1)
    create_config.env = EasyDict(type='smac_smax', import_names=['dizoo_configs.smac.smax_env'])
    # One process compiles the battle once for all its envs.
    create_config.env_manager.type = 'base'
    model.action_shape = actions
    if main_config.env.get('special_global_state', False):
        model.agent_obs_shape, model.global_obs_shape = obs, state + agents
    else:
        model.agent_num, model.obs_shape, model.global_obs_shape = agents, obs, state
