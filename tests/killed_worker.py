"""Work for worker processes of which one item kills its process, as a library below Python may."""

import os
from functools import partial


def make():
    return partial(_work)


def _work(item, advance):
    if item == "the bad file":
        os.abort()
    return item
