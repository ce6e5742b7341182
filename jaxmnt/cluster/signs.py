"""By which errors JAX's runtime tells that another process is gone: it has no type of its own for that."""

from jaxmnt.errors import PeerError

_SIGNS = (
    "Gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "heartbeat",
    "UNAVAILABLE",
    "NCCL",
    "remote process exited",
    "Connection closed by remote peer",
)


def bears_its_sign(error: BaseException) -> bool:
    """Whether the words of an error are those of a lost connection."""
    return any(sign in str(error) for sign in _SIGNS)


def may_tell_of_a_lost_peer(error: BaseException) -> bool:
    """Whether it is worth waiting a moment for the name of who is gone."""
    if isinstance(error, PeerError):
        return True
    import jax

    # A dispatch that finds a connection closed raises ValueError with the same words.
    return isinstance(error, jax.errors.JaxRuntimeError) or (isinstance(error, ValueError) and bears_its_sign(error))
