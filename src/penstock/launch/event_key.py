"""The key that event ids are signed with (``edge.event_ids``): a client cannot make up the id of another's stream.

All gateways of a service derive the same key, also after a restart and on other hosts.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from penstock.config.api_keys import load_keys
from penstock.wire.keys import Keys


def event_key(api_key: str | None, api_keys: str | None, max_tenants: int, shared: Keys | None = None) -> str:
    """The key in hex, derived from the first that is set: the salt of the file ``api_keys``, the secret of the keys
    that hosts share, ``api_key`` (all its holders are one tenant).  Raises ConfigError.
    """
    if api_keys is not None:
        secret = load_keys(Path(api_keys).expanduser(), max_tenants).salt.encode()
    elif shared is not None:
        secret = shared.server_secret
    else:
        secret = (api_key or "").encode()
    return blake2b(secret, digest_size=32, person=b"penstock events").hexdigest()
