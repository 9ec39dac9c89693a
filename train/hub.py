"""Uploading a folder to the Hub, and what to do where it refuses: the folder stays either way."""

from __future__ import annotations

from pathlib import Path

from cache.errors import ConfigError

_BY_STATUS = {
    401: "log in with `hf auth login`, with a token that may write",
    403: "use a token that may write there (`hf auth login`), or a repository of your own",
    404: "check the name's first part, the user or organization, and that your token may see it",
}


def require_repository_name(repository: str) -> None:
    """Check that the Hub could have a repository of that name, without asking it.

    Raises:
        ConfigError: it could not.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(
            f"--push-to-hub {repository}: {error}", do="name it as in --push-to-hub my-name/my-model"
        ) from error


def push(folder: Path, repository: str) -> None:
    """Upload a folder to a model repository, made private if it is new, with the Hub client's own credentials.

    Raises:
        ConfigError: the Hub cannot be reached or refuses.
    """
    from huggingface_hub import create_repo, upload_folder
    from huggingface_hub.errors import HfHubHTTPError

    try:
        create_repo(repository, exist_ok=True, private=True)
        upload_folder(repo_id=repository, folder_path=str(folder))
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = _BY_STATUS.get(status, "try again later")
        raise _refused(folder, repository, f"the Hub answered {status}: {_last_line(error)}", reason) from error
    except _network_errors() as error:
        reason = f"the Hub cannot be used: {_last_line(error)}"
        raise _refused(folder, repository, reason, "check the network, or go on where there is one") from error


def _network_errors() -> tuple[type[Exception], ...]:
    # The Hub client goes by httpx or httpx2, after its version; its own errors derive from theirs.
    from huggingface_hub.errors import HfHubHTTPError

    theirs = [kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError" and issubclass(kind, Exception)]
    return (*theirs, OSError, ValueError)


def _refused(folder: Path, repository: str, reason: str, advice: str) -> ConfigError:
    return ConfigError(
        f"the merged model is saved here, but was not uploaded to {repository}: {reason}",
        where=str(folder),
        do=f"{advice}; then `hf upload {repository} {folder}` uploads it without merging again",
    )


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
