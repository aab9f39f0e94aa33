"""What proves that an event's id is one of this service's (``edge.event_ids``).

All gateways of a service know it, also after a restart and on other hosts, and as far as that goes nobody else does.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from penstock.config.api_keys import load_keys
from penstock.config.schema import ServeConfig
from penstock.config.storefront import StoreConfig
from penstock.wire.keys import Keys


def event_key(config: ServeConfig | StoreConfig, shared: Keys | None = None) -> str:
    """In hex.  ``shared``: the keys that gateways on several hosts have.  Raises ConfigError.

    It follows from the salt of the file of API keys; or from the secret that gateways share; or from the one API key,
    whose holders are one tenant.
    """
    if config.api_keys is not None:
        path = Path(config.api_keys).expanduser()
        secret = load_keys(path, config.scheduling.max_tenants).salt.encode()
    elif shared is not None:
        secret = shared.server_secret
    else:
        secret = (config.api_key or "").encode()
    return blake2b(secret, digest_size=32, person=b"penstock events").hexdigest()
