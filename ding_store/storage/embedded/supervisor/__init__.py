"""The process that starts, watches and stops a run's private redis-server.

It runs on the standard library alone, as the top-level package ``supervisor`` under ``python -I -S``: starting it
imports neither ``ding_store`` nor numpy. Its modules therefore import each other relatively, and nothing else of ours.
"""
