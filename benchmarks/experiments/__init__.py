"""The experiments behind the tables: one package holds everything of one table or group of tables.

`options.py` holds the command's options and imports nothing heavy; the protocol makes the rows; `table.py` turns rows
into tables and figures; `render.py` registers what is rendered from the committed results (see `rendering.py`).
"""
