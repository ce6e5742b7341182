"""By which errors JAX's runtime tells that a process or a device is gone: it has no types of its own for that."""

from jaxmnt.errors import PeerError

_SIGNS = (
    "Gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "heartbeat",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "NCCL",
    "remote process exited",
    "Connection closed by remote peer",
)

_OF_A_BROKEN_DEVICE = (
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_SYSTEM_NOT_READY",
    "fallen off the bus",
    "GPU is lost",
    "uncorrectable ECC",
)
"""CUDA's names: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html"""


def tells_of_a_broken_device(why: str) -> bool:
    """Whether the words of an error are those of a device or driver, and not of the program that uses it."""
    return any(sign in why for sign in _OF_A_BROKEN_DEVICE)


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
