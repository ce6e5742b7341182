"""jaxmnt: multi-node language-model training in JAX and Flax.

Importing this package imports no JAX and touches no device.
"""

__version__ = "0.1.0"
