"""DI-engine's policies that learn from one collated batch as well as from a list of elements."""

from __future__ import annotations

import inspect
from typing import Any, FrozenSet

#: Classes of ``ding.policy`` whose ``_forward_learn`` collates with ``default_preprocess_learn``. It accepts a batch,
#: because ``default_collate`` returns a batch unchanged.
BATCHES: FrozenSet[str] = frozenset(
    {
        *('a2c.A2CPolicy', 'atoc.ATOCPolicy', 'bcq.BCQPolicy', 'bdq.BDQPolicy', 'c51.C51Policy', 'cql.CQLPolicy'),
        *('cql.DiscreteCQLPolicy', 'd4pg.D4PGPolicy', 'ddpg.DDPGPolicy', 'dqfd.DQFDPolicy', 'dqn.DQNPolicy'),
        *('dqn.DQNSTDIMPolicy', 'edac.EDACPolicy', 'fqf.FQFPolicy', 'happo.HAPPOPolicy', 'iqn.IQNPolicy'),
        *('mdqn.MDQNPolicy', 'offppo_collect_traj.OffPPOCollectTrajPolicy', 'pdqn.PDQNPolicy', 'pg.PGPolicy'),
        *('plan_diffuser.PDPolicy', 'ppo.PPOPolicy', 'ppo.PPOPGPolicy', 'ppo.PPOOffPolicy', 'ppo.PPOSTDIMPolicy'),
        *('qrdqn.QRDQNPolicy', 'rainbow.RainbowDQNPolicy', 'sac.DiscreteSACPolicy', 'sac.SACPolicy'),
        *('sac.SQILSACPolicy', 'sql.SQLPolicy', 'sqn.SQNPolicy', 'td3_bc.TD3BCPolicy', 'td3_vae.TD3VAEPolicy'),
    }
)
#: Classes of ``ding.policy`` whose ``_data_preprocess_learn`` collates sequences with ``timestep_collate`` or
#: ``default_collate``. It accepts a time-major batch.
SEQUENCES: FrozenSet[str] = frozenset(
    {
        *('acer.ACERPolicy', 'collaq.CollaQPolicy', 'coma.COMAPolicy', 'impala.IMPALAPolicy', 'madqn.MADQNPolicy'),
        *('ngu.NGUPolicy', 'ppg.PPGPolicy', 'ppg.PPGOffPolicy', 'qmix.QMIXPolicy', 'qtran.QTRANPolicy'),
        *('r2d2.R2D2Policy', 'r2d2_collect_traj.R2D2CollectTrajPolicy', 'r2d2_gtrxl.R2D2GTrXLPolicy'),
        *('r2d3.R2D3Policy', 'wqmix.WQMIXPolicy'),
    }
)


def takes_batch(policy: Any) -> bool:
    """
    Overview:
        Return True if a policy's learn mode accepts one collated batch instead of a list of elements. This holds for
        the policies in ``BATCHES``, and for subclasses that inherit their ``_forward_learn`` or wrap it with
        ``functools.wraps``.
    """
    return _has_method_of(policy, '_forward_learn', BATCHES)


def takes_sequences(policy: Any) -> bool:
    """
    Overview:
        Return True if a policy's learn mode accepts a time-major batch instead of a list of sequences. This holds for
        the policies in ``SEQUENCES``, and for subclasses that inherit their ``_data_preprocess_learn`` or wrap it with
        ``functools.wraps``. If the elements are no sequences, such a policy gets the list.
    """
    return _has_method_of(policy, '_data_preprocess_learn', SEQUENCES)


def _has_method_of(policy: Any, method: str, classes: FrozenSet[str]) -> bool:
    """Return whether the policy of this mode has the method of one of these classes."""
    kind = type(getattr(getattr(policy, 'forward', None), '__self__', None))
    known = [each for each in kind.__mro__ if _name_in_ding(each) in classes]
    return any(inspect.unwrap(getattr(kind, method)) is inspect.unwrap(getattr(each, method)) for each in known)


def _name_in_ding(kind: type) -> str:
    """Return 'dqn.DQNPolicy' for DI-engine's DQNPolicy, and '' for classes of other packages."""
    package, _, module = kind.__module__.rpartition('.')
    return f'{module}.{kind.__name__}' if package == 'ding.policy' else ''
