"""Linear algebra that the closed forms share: position rows, least squares, accumulated equations, the image prior."""
