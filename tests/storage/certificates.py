"""Certificates of a test's own authority, made with the openssl command."""

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any, Dict
from urllib.parse import urlencode

import pytest


def openssl(*words: str, cwd: Path) -> None:
    done = subprocess.run(['openssl', *words], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


class Authority:
    """Its certificate is ``ca.crt``; all keys are elliptic, because they are made in no time."""

    def __init__(self, directory: Path) -> None:
        if shutil.which('openssl') is None:
            pytest.skip('no command openssl')
        self.directory = directory
        directory.mkdir()
        self.ca = directory / 'ca.crt'
        curve = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes']
        names = ['-subj', '/CN=test authority', '-days', '2', '-addext', 'keyUsage=critical,keyCertSign']
        openssl('req', '-x509', *curve, '-keyout', 'ca.key', '-out', 'ca.crt', *names, cwd=directory)

    def issue(self, name: str, address: str = '127.0.0.1') -> None:
        """``<name>.crt`` and ``<name>.key``, good for a server at ``address`` and for a client."""
        curve = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes', '-subj', f'/CN={name}']
        openssl('req', *curve, '-keyout', f'{name}.key', '-out', f'{name}.csr', cwd=self.directory)
        (self.directory / 'extensions').write_text(f'subjectAltName=IP:{address}\n')
        sign = ['x509', '-req', '-in', f'{name}.csr', '-CA', 'ca.crt', '-CAkey', 'ca.key', '-CAcreateserial']
        sign += ['-days', '2', '-extfile', 'extensions', '-out', f'{name}.crt']
        openssl(*sign, cwd=self.directory)
        (self.directory / f'{name}.key').chmod(0o600)

    def pair(self, name: str) -> tuple:
        return str(self.directory / f'{name}.crt'), str(self.directory / f'{name}.key')

    def server_lines(self, name: str) -> str:
        """Return the lines of a redis.conf that accepts only TLS, also from replicas and from sentinels."""
        certificate, key = self.pair(name)
        words = {'cert-file': certificate, 'key-file': key, 'ca-cert-file': self.ca, 'replication': 'yes'}
        return ''.join(f'tls-{option} {word}\n' for option, word in words.items())

    def client_options(self, name: str) -> Dict[str, Any]:
        """Return the options of a redis.Redis with this certificate."""
        certificate, key = self.pair(name)
        return {'ssl': True, 'ssl_ca_certs': str(self.ca), 'ssl_certfile': certificate, 'ssl_keyfile': key}

    def query(self, name: str) -> str:
        """Return the query of the URL of a store with this certificate."""
        options = {option: value for option, value in self.client_options(name).items() if option != 'ssl'}
        return f'?{urlencode(options)}'

    def context(self, name: str, wants_client: bool) -> ssl.SSLContext:
        """Of a server with this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.pair(name))
        context.load_verify_locations(self.ca)
        context.verify_mode = ssl.CERT_REQUIRED if wants_client else ssl.CERT_NONE
        return context
