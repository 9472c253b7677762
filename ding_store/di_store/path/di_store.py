"""The name under which DI-engine imports DI-store's client."""

from ding_store.di_store import Client

__all__ = ['Client']
