"""A matplotlib figure that shows itself as the last line of a notebook's cell, with or without pyplot.

matplotlib's own figures show only if pyplot's inline backend is on. A ``Picture`` belongs to no pyplot: it is shown once, is gone
with its last reference, and has the same size and sharpness everywhere. This file imports matplotlib, so it is imported where
something is drawn (``panel.new_figure``).
"""

import base64
import importlib
import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["CSS_DPI", "Picture"]

CSS_DPI = 96
"""Pixels of a page in an inch."""
_SHARP = 2  # pixels of the picture to a pixel of the page, for screens that have so many


class Picture(Figure):
    """A figure with its Agg canvas, white, for ``savefig`` and for notebooks.

    Args:
        inches: width and height; an inch is 96 pixels of a page.
    """

    def __init__(self, inches: tuple[float, float]):
        super().__init__(inches, dpi=_SHARP * CSS_DPI, facecolor="white", layout="none")  # pyright: ignore[reportArgumentType]
        FigureCanvasAgg(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict[str, str], dict[str, Any]]:
        """A PNG with two pixels to a pixel of the page, and the width and height it is shown with."""
        del include, exclude  # there is one format
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=_SHARP * CSS_DPI)
        width, height = (round(CSS_DPI * inches) for inches in self.get_size_inches())
        data = {"image/png": base64.b64encode(out.getvalue()).decode(), "text/plain": repr(self)}
        return data, {"image/png": {"width": width, "height": height}}

    def _ipython_display_(self) -> None:
        """Show the picture. Without this the inline backend, once it is on, would draw its own, cropped and at another size."""
        data, metadata = self._repr_mimebundle_()
        importlib.import_module("IPython.display").display(data, metadata=metadata, raw=True)
