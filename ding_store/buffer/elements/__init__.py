"""The elements of a table: in columns, as Python objects or packed, and the metas of the rows."""
