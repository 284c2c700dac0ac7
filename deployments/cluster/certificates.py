"""Certificates: the authority of a cluster issues one to each of its machines, whose private key never leaves it."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 3650
"""Ray's processes read a certificate once, when they start, so that it must be valid for as long as they may run."""
SKEW = timedelta(days=1)
"""Certificates are valid from so long before they are issued, as clocks differ."""
MAX_REQUEST_CHARS = 4096
LOOPBACK = "127.0.0.1"


class RequestRefused(Exception):
    """A signing request is refused; the message says why."""


def new_key() -> str:
    """Return a new private key, on the curve P-256, as PEM."""
    return _pem_of(ec.generate_private_key(ec.SECP256R1()))


def signing_request(key: str, address: str) -> str:
    """Return a request for a certificate, as PEM.

    Args:
        key: Private key of the machine, as PEM.
        address: Address of the machine.
    """
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(address))
    return request.sign(_key_of(key), SHA256()).public_bytes(Encoding.PEM).decode()


def days_left(certificate: str) -> float:
    """Return how many days a certificate, as PEM, is still valid; negative once it has expired."""
    end = x509.load_pem_x509_certificate(certificate.encode()).not_valid_after_utc
    return (end - datetime.now(UTC)) / timedelta(days=1)


class Authority:
    """The authority of a cluster.

    Args:
        certificate: Its certificate, as PEM.
        key: Its private key, as PEM.
    """

    def __init__(self, certificate: str, key: str):
        self.certificate, self.key = certificate, key
        self._certificate = x509.load_pem_x509_certificate(certificate.encode())
        self._key = _key_of(key)

    @classmethod
    def new(cls, days: float = VALID_DAYS) -> "Authority":
        """Make an authority that is valid for so many days."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("Orchard cluster")
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        made = (
            _builder(name, name, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, SHA256())
        )
        return cls(made.public_bytes(Encoding.PEM).decode(), _pem_of(key))

    def issue(self, request: str, address: str, days: float = VALID_DAYS) -> str:
        """Return the certificate of a machine, as PEM.

        Args:
            request: Its signing request, as PEM; only the public key is taken from it.
            address: IP address by which the other machines reach it.
            days: How long the certificate is valid.

        Raises:
            RequestRefused: It is no request, or its sender does not have the private key.
        """
        public_key = _public_key_of(request)
        names = x509.SubjectAlternativeName(
            [
                x509.IPAddress(ip_address(address)),
                x509.IPAddress(ip_address(LOOPBACK)),
                x509.DNSName("localhost"),
            ]
        )
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        made = (
            _builder(_name(address), self._certificate.subject, public_key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .add_extension(uses, critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, SHA256())
        )
        return made.public_bytes(Encoding.PEM).decode()


def _public_key_of(request: str) -> ec.EllipticCurvePublicKey:
    if len(request) > MAX_REQUEST_CHARS:
        raise RequestRefused(f"a signing request has {len(request)} characters; the limit is {MAX_REQUEST_CHARS}")
    try:
        parsed = x509.load_pem_x509_csr(request.encode())
        public_key, is_signed = parsed.public_key(), parsed.is_signature_valid
    except (ValueError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise RequestRefused(f"the signing request cannot be read: {error}") from None
    if not is_signed:
        raise RequestRefused("the signing request is not signed with its own key")
    if not isinstance(public_key, ec.EllipticCurvePublicKey) or public_key.curve.name != "secp256r1":
        raise RequestRefused("the signing request has no key on the curve P-256")
    return public_key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_of(pem: str) -> ec.EllipticCurvePrivateKey:
    key = load_pem_private_key(pem.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _pem_of(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
