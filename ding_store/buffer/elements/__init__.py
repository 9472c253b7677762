"""Elements over a table: in columns, as objects or packed; and what is said about them."""
