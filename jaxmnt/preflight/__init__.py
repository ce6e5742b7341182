"""Are these hosts, and the network between them, what a run needs?"""
