"""Two network namespaces with a wire between them, and certificates for both ends."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.environments import AbsentError

# RFC 2544 sets this network apart for benchmarks.
_SERVER_HOST, _CLIENT_HOST, _PREFIX_BITS = "198.18.0.1", "198.18.0.2", 30
_TIMEOUT_S = 60.0


class Namespaces:
    """Lives until `close`. Needs root, iproute2 and openssl."""

    server_host = _SERVER_HOST
    client_host = _CLIENT_HOST

    def __init__(self) -> None:
        """Makes the namespaces.

        Raises:
            AbsentError: This machine or this user cannot have them.
        """
        for program in ("ip", "openssl"):
            if shutil.which(program) is None:
                raise AbsentError(f"{program} is not on the PATH")
        if os.geteuid() != 0:
            raise AbsentError("network namespaces need root")
        self._names = tuple(f"courier-{os.getpid()}-{end}" for end in ("server", "client"))
        self.certificates = Path(tempfile.mkdtemp(prefix="bench"))
        try:
            self._connect()
            self._certify()
        except AbsentError:
            self.close()
            raise

    @property
    def server(self) -> tuple[str, ...]:
        """The command that runs another one at the server's end."""
        return ("ip", "netns", "exec", self._names[0])

    @property
    def client(self) -> tuple[str, ...]:
        """The command that runs another one at the client's end."""
        return ("ip", "netns", "exec", self._names[1])

    @property
    def hosts(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The address of each end, and the command that runs another one there as on its own host.

        Processes of the two ends do not see each other, so that they cannot share memory.
        """
        alone = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        ends = ((self.server_host, self.server), (self.client_host, self.client))
        return tuple((host, (*command, *alone)) for host, command in ends)

    def close(self) -> None:
        """Removes both namespaces, and the wire with them."""
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        shutil.rmtree(self.certificates, ignore_errors=True)

    def _connect(self) -> None:
        for name in self._names:
            _run("ip", "netns", "add", name)
        server, client = self._names
        _run(
            "ip",
            "-n",
            server,
            "link",
            "add",
            "wire",
            "type",
            "veth",
            "peer",
            "wire",
            "netns",
            client,
        )
        for name, host in zip(self._names, (_SERVER_HOST, _CLIENT_HOST), strict=True):
            _run("ip", "-n", name, "address", "add", f"{host}/{_PREFIX_BITS}", "dev", "wire")
            _run("ip", "-n", name, "link", "set", "wire", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def _certify(self) -> None:
        """Makes an authority, and one certificate that both ends show."""
        folder = self.certificates
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        authority = (f"{folder}/authority.pem", f"{folder}/authority-key.pem")
        _run(
            *("openssl", "req", "-x509", *new_key, "-days", "2", "-subj", "/CN=authority"),
            *("-out", authority[0], "-keyout", authority[1]),
        )
        _run(
            *("openssl", "req", *new_key, "-subj", "/CN=benchmark"),
            *("-out", f"{folder}/request.pem", "-keyout", f"{folder}/key.pem"),
        )
        extensions = folder / "extensions"
        extensions.write_text(
            f"subjectAltName=IP:{_SERVER_HOST},IP:{_CLIENT_HOST},DNS:localhost\n"
            "extendedKeyUsage=serverAuth,clientAuth\n"
        )
        _run(
            *("openssl", "x509", "-req", "-days", "2", "-in", f"{folder}/request.pem"),
            *("-CA", authority[0], "-CAkey", authority[1], "-CAcreateserial"),
            *("-extfile", str(extensions), "-out", f"{folder}/certificate.pem"),
        )


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise AbsentError(f"{command[0]} says {error.stderr.strip()[-200:]!r}") from error
    except subprocess.TimeoutExpired as error:
        raise AbsentError(f"{command[0]} hangs") from error
