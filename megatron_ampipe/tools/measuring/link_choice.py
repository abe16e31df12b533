"""Finds out which slow link this machine allows: a real network if possible, else an emulated one.

A real network needs the rights to make network namespaces. Root usually has them; another user has them in a
user namespace (``unshare --user``), where the kernel permits that. What is possible is found by trying: a
network between two idle processes is made and removed, in a separate process. Imports no torch. Called by the
quick start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.tools.measuring import network
from megatron_ampipe.tools.measuring.link import Link, LinkKind, parse_link, require_one_class

IN_USER_NAMESPACE = ("unshare", "--user", "--map-root-user", "--net", "--")
"""Runs a command as the root of a new user namespace, which may make network namespaces."""

# Where tc is on many systems, and not on the path of an ordinary user.
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
_MODULE = "megatron_ampipe.tools.measuring.link_choice"
_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """What to run over.

    Attributes:
        link: Real, emulated, or none where none was wanted.
        prefix: Put before the command that starts the ranks; empty where it can start them as it is.
        why_emulated: Why no real network could be made, where one was wanted and the link is emulated.
    """

    link: Link
    prefix: tuple[str, ...] = ()
    why_emulated: str | None = None


def choose_link(wanted: str, *, may_emulate: bool) -> LinkChoice:
    """The link that is wanted, and how it can be made here.

    Args:
        wanted: A value of ``--link``.
        may_emulate: Take an emulated link of the same rate where no real one can be made.

    Raises:
        BadInput: ``wanted`` is not a link.
        EnvironmentMissing: no real network can be made, and none may be emulated.
    """
    link = parse_link(wanted)
    require_one_class(link)
    if link.kind is not LinkKind.NETWORK:
        return LinkChoice(link)
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([*path, *(f for f in _SYSTEM_FOLDERS if f not in path)])
    reasons = []
    for prefix in ((), IN_USER_NAMESPACE):
        reason = _why_not(prefix, link)
        if reason is None:
            return LinkChoice(link, prefix)
        reasons.append(reason)
    # The second is most often the first again.
    why = "; ".join(dict.fromkeys(reasons))
    if not may_emulate:
        raise EnvironmentMissing(
            f"--link {wanted} needs a real network between network namespaces, which cannot be made here: "
            f"{why}. Use --link emulated:{wanted}, which needs none."
        )
    return LinkChoice(parse_link(f"emulated:{wanted}"), why_emulated=why)


def _why_not(prefix: Sequence[str], link: Link) -> str | None:
    """Why a command with this prefix cannot make the network; None if it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    missing = network.missing_programs()
    if missing:
        return f"{' and '.join(missing)} not found (packages iproute2 and util-linux)"
    if not prefix and os.geteuid() != 0:
        return "this is not root"
    command = [*prefix, sys.executable, "-m", _MODULE, link.text]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"'{' '.join(command)}' ended with code {done.returncode}"


def main() -> int:
    """Try the network of the rate in the first argument; what is wrong goes to standard error."""
    link = parse_link(sys.argv[1])
    assert link.rate_bit_per_s is not None
    try:
        network.try_out(rate_bit_per_s=link.rate_bit_per_s)
    except network.NetworkUnavailable as error:
        print(error.reason, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
