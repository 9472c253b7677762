"""The process that starts, watches and stops a run's private redis-server.

It is the top-level package ``supervisor`` under ``python -I -S`` and needs the standard library only. Starting it
imports neither ``ding_store`` nor numpy. Its modules import each other relatively, and no other module of ding_store.
"""
