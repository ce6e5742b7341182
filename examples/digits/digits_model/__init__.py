"""A classifier of images of digits: its data, model family, loss and optimizer."""
