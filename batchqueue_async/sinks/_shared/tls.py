"""TLS for sinks: verified unless told otherwise, and told the same way to every client."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks._shared.secrets import Secret, resolve

if TYPE_CHECKING:
    import os


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How a connection is encrypted and who may be at its other end.

    Example:
        >>> Tls().context().verify_mode.name
        'CERT_REQUIRED'

    Attributes:
        ca: a file with the certificates to trust; None trusts those of the system.
        cert: a file with our own certificate, where the server asks for one.
        key: a file with its private key; None finds it in `cert`.
        key_password: what the key is encrypted with: `env:NAME`, `file:/path` or the value.
        verify: whether the server must show a certificate that is trusted and made for its name. Turning this off
            lets anyone in between read and change everything.
        server_name: the name that the server's certificate must have, where it is not the name we connect to.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    key_password: str | Secret | None = None
    verify: bool = True
    server_name: str | None = None

    def __post_init__(self) -> None:
        if self.key is not None and self.cert is None:
            raise ConfigError(f"TLS: key={str(self.key)!r} is given without a certificate; give cert=... too")
        if not self.verify and (self.ca is not None or self.server_name is not None):
            raise ConfigError("TLS: verify=False looks at no certificate, so ca and server_name mean nothing with it")
        if self.key_password is not None:  # a dataclass shows its fields
            object.__setattr__(self, "key_password", Secret(self.key_password))

    def context(self) -> ssl.SSLContext:
        """What Python's clients take.

        Raises:
            ConfigError: a file cannot be read or holds no certificate; the message names it.
        """
        context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
        context.server_name = self.server_name
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        name = self.ca
        try:
            if name is not None:
                context.load_verify_locations(name)
            elif self.verify:
                context.load_default_certs()
            if self.cert is not None:
                name = self.cert
                context.load_cert_chain(name, self.key, lambda: resolve(self.key_password) or "")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"TLS: {str(name)!r} cannot be used: {reason}") from error


TlsOption: TypeAlias = Tls | ssl.SSLContext | bool | None
"""What a sink's option `tls` takes: None or False is no TLS, True is `Tls()`."""


def context(tls: TlsOption) -> ssl.SSLContext | None:
    """What an option `tls` asks for, as an SSL context; None is no TLS.

    Example:
        >>> context(True).check_hostname
        True
        >>> context(None) is None
        True
    """
    if tls is None or tls is False:
        return None
    if isinstance(tls, ssl.SSLContext):
        return tls
    if tls is True:
        return Tls().context()
    if isinstance(tls, Tls):
        return tls.context()
    raise ConfigError(f"tls={tls!r} is none of True, a Tls and an ssl.SSLContext")


class _NamedContext(ssl.SSLContext):
    """A context that asks for a name of its own: most clients have no option for it, and pass the host's.

    The event loops, and so all clients on them, come by `wrap_bio`.
    """

    server_name: str | None = None

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # noqa: FBT001, FBT002 - the signature is Python's
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return super().wrap_bio(incoming, outgoing, server_side, self.server_name or server_hostname, session)
