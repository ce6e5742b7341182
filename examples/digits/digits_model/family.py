"""A Llama that also knows the row and the column of each pixel."""

from dataclasses import dataclass

from flax import nnx

from jaxmnt.models.layers import weight
from jaxmnt.models.llama import Llama
from jaxmnt.parallel.collectives import share_of


@dataclass(frozen=True)
class Grid:
    """The settings of the family, which `model.options` sets."""

    width: int
    height: int


class GridPositions(nnx.Module):
    """A learned vector for each row and for each column of a grid."""

    def __init__(self, grid: Grid, hidden_size: int, rngs: nnx.Rngs):
        self.rows = weight(rngs, (grid.height, hidden_size), (None, "embed"))
        self.columns = weight(rngs, (grid.width, hidden_size), (None, "embed"))


class Digits(Llama):
    """The family: `model.family: digits_model.family.Digits`."""

    Options = Grid

    def before(self, rngs):
        """Returns the modules before the first layer."""
        return super().before(rngs) | {"grid": GridPositions(self.options, self.config.hidden_size, rngs)}

    def embed(self, ends, tokens_BL, positions_BL, dtype, placement):
        """Returns the embedded tokens, and adds the vectors of their rows and columns.

        The result is summed over the devices that share the vocabulary. All of them compute the same vectors, so each
        adds its share.
        """
        x_BLD = super().embed(ends, tokens_BL, positions_BL, dtype, placement)
        rows, columns = ends["grid"].rows[...], ends["grid"].columns[...]
        grid_BLD = rows[positions_BL // self.options.width] + columns[positions_BL % self.options.width]
        return x_BLD + share_of("vocab", grid_BLD.astype(dtype), placement)
