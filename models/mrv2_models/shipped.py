"""Files that come with the packages but are no part of them: draft heads, notebooks, recordings.

A checkout has them at their places; an installed distribution under ``share/mrv2-workbench``, laid out alike.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

SHARE = Path("share") / "mrv2-workbench"
_CHECKOUT = Path(__file__).resolve().parents[2]


def places() -> list[Path]:
    """Return where shipped files may lie, in the order of looking: the checkout, then where pip puts data files."""
    # pip install --target puts them beside the packages, --user and environments under their own roots
    roots = [Path(__file__).resolve().parents[1], Path(sysconfig.get_path("data"))]
    if "posix_user" in sysconfig.get_scheme_names():
        roots.append(Path(sysconfig.get_path("data", "posix_user")))
    return [_CHECKOUT, *(root / SHARE for root in roots)]


def shipped(path: str) -> Path:
    """Return a file or folder that ships, for example ``"models/checkpoints"``, named as in a checkout.

    Raises `FileNotFoundError` with the places that were looked at.
    """
    tried = [place / path for place in places()]
    for found in tried:
        if found.exists():
            return found
    raise FileNotFoundError(
        f"{path} did not come with this installation (looked at {', '.join(map(str, tried))}): install the wheel of "
        "mrv2-workbench, or use a checkout of the repository"
    )
