"""A folder that is named by variables of the node: they are known where it is used, not where jobs are submitted."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cache.errors import ConfigError

_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^}]*)\})")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def node_folder(named: Path, setting: str) -> Path:
    """The folder with `$NAME`, `${NAME}` and a leading `~` replaced by what they are in this process.

    Args:
        setting: the key that names it, for messages.

    Raises:
        ConfigError: a variable is not set or empty, the user's home is not known, or `${...}` holds more than a name.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{setting}: {named}: {found[0]} is no name of a variable", do="write $NAME or ${NAME}, and no more"
            )
        if not os.environ.get(name):
            raise ConfigError(
                f"{setting}: {named}: ${name} is {'empty' if name in os.environ else 'not set'} on this node",
                do="export it where the job runs, e.g. in slurm.setup, or name the folder itself",
            )
        return os.environ[name]

    try:
        return Path(_VARIABLE.sub(value, str(named))).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{setting}: {named}: the home of {named.parts[0]} is not known", do="name the folder itself"
        ) from error
