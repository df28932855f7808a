"""The part of matplotlib that pictures are drawn with."""
