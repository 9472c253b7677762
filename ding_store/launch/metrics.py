"""``ding-store metrics``: serves a run's status to Prometheus over HTTP."""

from __future__ import annotations

import sys
import threading
from typing import Any, Dict

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError
from ding_store.launch.printing import print_to
from ding_store.launch.status import check_running, has_ended, opened_look


def serve_metrics(config: StoreConfig, address: str, port: int, every_s: float = 1.0) -> int:
    """
    Overview:
        Serve the metrics of a run until it ends, or until the command is interrupted. A run on a Redis server may start
        later, and another one of its name may follow.
    Raises:
        - ConfigError: prometheus_client is not installed, or the port cannot be opened.
    """
    check_running(config)
    with opened_look(config) as look:

        def read() -> Dict[str, Any]:
            with look.store.nonblocking():
                return look.read(0.0)

        server = start_server(str(config.run), read, address, port)
        host, port = server.server_address[:2]
        print_to(sys.stderr, f'metrics of run {config.run!r}: http://{host}:{port}/metrics\n')
        try:
            while not has_ended(config):
                threading.Event().wait(every_s)
        except KeyboardInterrupt:
            pass
        finally:
            server.shutdown()
            server.server_close()
    return 0


def start_server(run: str, read: Any, address: str, port: int) -> Any:
    """Start an HTTP server in a thread that answers each scrape with the status that ``read`` returns."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from ding_store.metrics.exporter import RunCollector
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"metrics needs {error.name}, which is not installed. Run: pip install 'ding_store[metrics]'"
        ) from error
    registry = CollectorRegistry()
    registry.register(RunCollector(run, read))
    try:
        server, _ = start_http_server(port, address, registry)
    except OSError as error:
        raise ConfigError(
            f'--port {port} of {address} cannot be opened ({error.strerror}). Choose another one, or 0 for a free one'
        ) from error
    return server
