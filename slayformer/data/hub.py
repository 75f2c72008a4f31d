"""The Hugging Face hub as a source of data: a machine that cannot reach it is told so at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# whether this process has reached it: what fails from then on may pass, and is waited for
_reached = False


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Let `datasets` use its cache alone, inside, where the hub cannot be reached at all.

    Left to itself the package tries again for half a minute, with two lines each time. Once the hub
    has been reached, and where it answers but refuses, that is what it does.
    Raises ConnectionError, with the reason, if the cache does not have what is wanted.
    """
    import datasets
    from huggingface_hub import constants

    address = datasets.config.HF_ENDPOINT
    failure = None if datasets.config.HF_HUB_OFFLINE else _failure_to_reach(address)
    if failure is None:
        yield
        return
    offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    except ConnectionError as error:
        raise ConnectionError(f"{address} cannot be reached ({failure})") from error
    finally:
        constants.HF_HUB_OFFLINE = offline


def _failure_to_reach(address: str) -> Exception | None:
    """Return why no connection to the hub at `address` can be made, None if one can."""
    global _reached
    if _reached:
        return None
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import httpx

    try:
        get_session().head(address, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (
        httpx.ConnectError,
        httpx.ConnectTimeout,
        httpx.ProxyError,
        OfflineModeIsEnabled,
    ) as error:
        return error
    except httpx.TransportError:
        # it is there, and slow or busy
        return None
    _reached = True
    return None
