"""Several learners of one model, for any torch optimizer: a parameter server, averages, gossip and Hogwild."""

from ding_store.learners.optimizer import StoreOptimizer
from ding_store.learners.parameter_server import ParameterServer

__all__ = ['ParameterServer', 'StoreOptimizer']
