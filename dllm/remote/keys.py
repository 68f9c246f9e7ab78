"""Who may talk to whom over TCP: TLS in which both sides show a certificate that the other knows.

``dllm draft-keys DIR`` makes a key pair for one process:

    DIR/key.pem           the secret key; it stays on its machine
    DIR/certificate.pem   the public part
    DIR/trusted/*.pem     certificates of those whom this process talks to; copied there by hand

A worker's ``trusted`` has the certificate of each of its targets, and a target's that of its
workers. No authority signs anything: a certificate is known, or it is not.
"""

import argparse
import datetime
import os
import ssl
import stat
from collections.abc import Sequence
from pathlib import Path

from dllm.settings.command import OK, CommandError

KEY, CERTIFICATE, TRUSTED = "key.pem", "certificate.pem", "trusted"


class Keys:
    """The keys of a folder; ``contexts`` make TLS of a socket, by whether this side is the server.

    Raises ValueError: a file is missing or wrong, others can read the secret key, or nobody is
    trusted.
    """

    def __init__(self, folder: str) -> None:
        self._folder = path = Path(folder)
        for name in (KEY, CERTIFICATE):
            if not (path / name).is_file():
                raise ValueError(f"keys: there is no {path / name}. Run: dllm draft-keys {folder}")
        if (path / KEY).stat().st_mode & 0o077:
            raise ValueError(f"keys: others may read {path / KEY}. Run: chmod 600 {path / KEY}")
        trusted = sorted((path / TRUSTED).glob("*.pem"))
        if not trusted:
            raise ValueError(f"keys: no certificate in {path / TRUSTED}: nobody is trusted.")
        self._trusted = {_read(each) for each in trusted}
        self.contexts = {is_server: self._context(is_server) for is_server in (False, True)}

    def _context(self, is_server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate itself is known
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY)
            context.load_verify_locations(cadata=b"".join(self._trusted))
        except OSError as error:
            raise ValueError(f"keys: {self._folder}: {error}") from None
        return context

    def check(self, connection: ssl.SSLSocket) -> None:
        """Behind the handshake. Raises ssl.SSLError: the peer's certificate is not trusted."""
        if connection.getpeercert(binary_form=True) not in self._trusted:
            raise ssl.SSLError("its certificate is not in trusted")


def _read(file: Path) -> bytes:
    """The certificate in DER."""
    try:
        return ssl.PEM_cert_to_DER_cert(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"keys: {file}: {error}") from None


def write_keys(folder: Path) -> None:
    """Raises CommandError: the folder has a key already, which is never overwritten, or is none."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise CommandError("making keys needs: pip install cryptography") from None
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"{folder} is no folder. Name another one.")
    if (folder / KEY).exists() or (folder / CERTIFICATE).exists():
        raise CommandError(f"{folder} has keys already. Name another folder.")
    key = ec.generate_private_key(ec.SECP256R1())
    number = x509.random_serial_number()
    # OpenSSL finds a certificate by its name: each has another one.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"dllm {number:x}"[:64])])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), number)
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))  # it is trusted until it is deleted
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / TRUSTED).mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    mode = stat.S_IRUSR | stat.S_IWUSR
    with open(os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(secret)
    (folder / CERTIFICATE).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="dllm draft-keys", description="Make a key pair for a draft worker or a target."
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args(argv).folder
    write_keys(folder)
    print(
        f"{folder / KEY} is secret and stays here. Copy {folder / CERTIFICATE} into the folder "
        f"{TRUSTED} of each process that this one talks to, under any name that ends with .pem, "
        f"and theirs into {folder / TRUSTED}."
    )
    return OK
