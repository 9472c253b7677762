"""The table: rows in memory-mapped columns, the index of rows, reads, and changes of capacity and columns."""
