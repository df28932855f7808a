from matplotlib.artist import Artist

class Patch(Artist):
    def __init__(self, *, color: str, label: str) -> None: ...
