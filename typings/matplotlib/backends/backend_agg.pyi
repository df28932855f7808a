from matplotlib.figure import Figure

class FigureCanvasAgg:
    def __init__(self, figure: Figure) -> None: ...
